"""The way to the server's actor: weights by reference, folded in order, bundle by bundle."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from fedppd_ray.errors import ServerLostError
from fedppd_ray.federation.executor import Arrival
from fedppd_ray.federation.types import GlobalState, Receipt
from fedppd_ray.runtime.hosts import reason

_POLL_S = 0.2
# Calls to the server that are under way at most. It works them off in order; a slow one must hold the clients up
# rather than have their weights pile up in the object store.
AHEAD = 4


@dataclass(frozen=True)
class Weights:
    """Where an update's weights are, and what the screen said of them.

    The receipts go to the server by reference too: they came with the weights, and to pack a thousand small objects
    anew for every call was most of what the driver did.
    """

    receipts: Any
    models: Any
    place: int
    refusal: str | None


class RayServerLink:
    def __init__(self, handle: Any, start_timeout_s: float) -> None:
        self.handle = handle
        self._start_timeout_s = start_timeout_s
        self._forget_round()

    def _forget_round(self) -> None:
        self._to_fold: list[Weights] = []  # of one bundle
        self._folding: deque[Any] = deque()

    def install(self, state: GlobalState | None) -> None:
        """Waits for a server that is being started anew."""
        limit = time.monotonic() + self._start_timeout_s
        while True:
            try:
                self.ask(lambda: self.handle.install.remote(state))
                return
            except ServerLostError:
                if time.monotonic() > limit:
                    raise
                time.sleep(_POLL_S)

    def state(self) -> GlobalState:
        return self.ask(lambda: self.handle.state.remote())

    def begin(self, round_id: int) -> Any:
        # A round that is begun again (the server died) has no use for the answers of the first attempt.
        self._forget_round()
        # The driver reads the marker only; the state itself goes to the clients by reference.
        marker, state = self.handle.publish.options(num_returns=2).remote(round_id)
        self.ask(lambda: marker)
        return state

    def screen(self, clients: Sequence[str], receipts: Any, models: Any) -> Any:
        """A reference to the server's answer: of each client, why its update may not count, or None."""
        return self.handle.screen.remote(clients, receipts, models)

    def refusal(self, arrival: Arrival) -> str | None:
        return _weights(arrival).refusal

    def fold(self, arrival: Arrival) -> Receipt:
        """In the order of the calls, but not at once: the server is not waited for until `finish`."""
        weights = _weights(arrival)
        if self._to_fold and self._to_fold[0].models is not weights.models:
            self.flush()
        self._to_fold.append(weights)
        return arrival.receipt

    def flush(self) -> None:
        """Send off what was folded so far: nothing waits while the driver waits for clients."""
        if not self._to_fold:
            return
        while len(self._folding) >= AHEAD:
            self._folded()
        places, bundle = [weights.place for weights in self._to_fold], self._to_fold[0]
        self._folding.append(self.handle.accept.remote(places, bundle.receipts, bundle.models))
        self._to_fold = []

    def _folded(self) -> None:
        try:
            self.ask(self._folding.popleft)
        except ObjectLostError:
            raise ServerLostError("weights were lost with their node before they were folded") from None

    def finish(self) -> None:
        self.flush()
        while self._folding:
            self._folded()
        self.ask(lambda: self.handle.finish.remote())

    def ask(self, call: Callable[[], Any]) -> Any:
        """The answer to a call of the server; ServerLostError where its process died."""
        try:
            return ray.get(call())
        except RayActorError as error:
            raise ServerLostError(f"the server's process died ({reason(error)})") from None


def _weights(arrival: Arrival) -> Weights:
    if not isinstance(arrival.payload, Weights):
        raise TypeError(f"{arrival.client}: not an arrival of this executor")
    return arrival.payload
