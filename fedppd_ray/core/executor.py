"""Where work runs: the contract between the round loop and an executor, and the executor without Ray."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config import Config
from fedppd_ray.core.client import ClientWorker
from fedppd_ray.core.server import ServerWorker
from fedppd_ray.core.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.errors import LocalUpdateCancelled


@dataclass(frozen=True)
class Arrival:
    """A client's answer. `payload` is the executor's business (weights, or a reference to them)."""

    client: str
    receipt: Receipt
    payload: object


@dataclass(frozen=True)
class Lost:
    """A client's attempt that will bring no answer."""

    client: str
    reason: str
    late: bool = False


class Executor(Protocol):
    """Runs clients and the server. The round loop decides; the executor moves."""

    def describe(self) -> list[ClientInfo]: ...
    def install(self, state: GlobalState | None) -> None:
        """Give the server its state; None: the method's initial state for this seed."""

    def state(self) -> GlobalState: ...
    def begin(self, round_id: int) -> None:
        """Publish the server's state to the clients of this round."""

    def start(self, client: str) -> None: ...
    def next_event(self) -> Arrival | Lost:
        """Block until a client answers or is lost; a passed deadline loses all that are still out."""

    def refusal(self, arrival: Arrival) -> str | None: ...
    def fold(self, arrival: Arrival) -> Receipt: ...
    def finish(self) -> None:
        """The server update: aggregate what was folded into the next global state."""

    def predict(self, split: str) -> NDArray[np.float64]:
        """Log-probabilities of the current predictor on 'test', 'calibration' or 'ood'."""

    def close(self) -> None: ...


class SerialExecutor:
    """Everything in this process, one client after the other: for debugging and as the reference."""

    def __init__(self, config: Config, clients: Sequence[str], ranked_by: Sequence[GlobalState] = ()) -> None:
        # The same arithmetic as an actor's: the number of threads may change the last bit.
        torch.set_num_threads(1)
        self._server = ServerWorker(config)
        self._worker = ClientWorker(config, clients, ranked_by=ranked_by)
        self._queue: deque[str] = deque()
        self._published: GlobalState | None = None

    def describe(self) -> list[ClientInfo]:
        return self._worker.describe()

    def install(self, state: GlobalState | None) -> None:
        self._server.install(state)

    def state(self) -> GlobalState:
        return self._server.state()

    def begin(self, round_id: int) -> None:
        self._queue.clear()
        self._published = self._server.begin(round_id)

    def start(self, client: str) -> None:
        self._queue.append(client)

    def next_event(self) -> Arrival | Lost:
        client = self._queue.popleft()
        if self._published is None:
            raise RuntimeError("begin() comes before next_event()")
        try:
            update = self._worker.local_update(client, self._published)
        except (ArithmeticError, LookupError, RuntimeError, ValueError, LocalUpdateCancelled) as error:
            return Lost(client, f"{type(error).__name__}: {error}")
        return Arrival(client, update.receipt, update.models)

    def refusal(self, arrival: Arrival) -> str | None:
        return self._server.refusal(arrival.client, _update(arrival))

    def fold(self, arrival: Arrival) -> Receipt:
        return self._server.fold(_update(arrival))

    def finish(self) -> None:
        self._server.finish()

    def predict(self, split: str) -> NDArray[np.float64]:
        return self._server.predict(split)

    def close(self) -> None:
        return None


def _update(arrival: Arrival) -> ClientUpdate:
    return ClientUpdate(arrival.receipt, arrival.payload)  # type: ignore[arg-type]
