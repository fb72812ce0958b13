"""The clients' actors in a round: who is sent off when, who has answered, who is lost."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ServerLostError
from fedppd_ray.federation.executor import Arrival, Lost
from fedppd_ray.federation.types import ClientInfo, GlobalState, Receipt
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.runtime.asking import Asking
from fedppd_ray.runtime.bundles import bundle_size
from fedppd_ray.runtime.hosts import Host, Hosts, reason
from fedppd_ray.runtime.server_link import AHEAD, RayServerLink, Weights

_FADING = 0.8  # of the memory of slower clients: the next bundle may hold some again


@dataclass(frozen=True)
class _Bundle:
    """Clients that an actor works on in one call; none, where nobody waits for them any more."""

    clients: tuple[str, ...]
    host: Host
    receipts: Any  # reference to a list of what they say of their updates
    models: Any  # reference to a list of their weights


class RayClientPool:
    """Updates are screened by the server as they arrive; their weights never pass through the driver."""

    def __init__(self, config: Config, hosts: Hosts, server: RayServerLink) -> None:
        self._config = config
        self._hosts = hosts
        self._server = server
        self._asking = Asking(hosts, config.resources.start_timeout_s)
        self._state_ref: Any = None
        self._round = 0
        self._deadline: float | None = None
        self._seconds: float | None = None  # what a client's update took lately
        self._pending: dict[Any, _Bundle] = {}  # by the reference to the receipts
        self._forget_round()

    def _forget_round(self) -> None:
        """What belongs to one attempt at one round, and to no other."""
        self._queue: deque[str] = deque()  # told to start, waiting for a host
        self._alone: set[str] = set()  # not to be bundled: it was in a bundle that failed
        self._screening: dict[Any, tuple[_Bundle, list[Receipt]]] = {}  # by the reference to the server's answer
        self._events: deque[Arrival | Lost] = deque()  # not yet asked for
        self._pending = {ref: replace(bundle, clients=()) for ref, bundle in self._pending.items()}

    def describe(self) -> list[ClientInfo]:
        return self._hosts.describe()

    def ask(self, question: Question, state: GlobalState) -> dict[str, Answer]:
        return self._asking.ask(question, state)

    def open(self, round_id: int, published: object) -> None:
        self._forget_round()
        self._round, self._state_ref = round_id, published
        limit = self._config.federation.deadline_s
        self._deadline = None if limit is None else time.monotonic() + limit

    def start(self, client: str) -> None:
        self._queue.append(client)

    def next_event(self) -> Arrival | Lost:
        while not self._events:
            self._server.flush()
            if len(self._screening) < AHEAD:
                self._dispatch()
            pings = self._hosts.pings()
            if pings and (lost := self._hopeless()):
                return lost
            waiting = [*self._screening, *self._pending, *pings]
            ready, _ = ray.wait(waiting, timeout=self._time_left(), fetch_local=False)
            if not ready and self._screening:
                ready, _ = ray.wait(list(self._screening), fetch_local=False)  # they came in time
            if not ready:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._give_up()
            elif ready[0] in pings:
                self._hosts.ping_answered(pings[ready[0]])
            elif ready[0] in self._screening:
                self._screened(ready[0])
            else:
                self._answer(ready[0])
        return self._events.popleft()

    def _hopeless(self) -> Lost | None:
        for client in self._queue:
            if trouble := self._hosts.hopeless(client):
                self._queue.remove(client)
                return Lost(client, trouble, late=True)
        return None

    def _dispatch(self) -> None:
        """Send off the queued clients that have a free host, in their order."""
        held_back: list[str] = []
        while self._queue and not self._hosts.all_busy():
            client = self._queue.popleft()
            host = self._hosts.free_for(client)
            if host is None:
                held_back.append(client)
                continue
            clients = (client, *self._companions(client, host))
            receipts, models = host.handle.train.options(num_returns=2).remote(clients, self._state_ref)
            self._hosts.occupy(host)
            self._pending[receipts] = _Bundle(clients, host, receipts, models)
        self._queue.extendleft(reversed(held_back))

    def _companions(self, client: str, host: Host) -> list[str]:
        """The next in the queue that go with this client in one call: virtual clients of the same actors."""
        size = bundle_size(1 + len(self._queue), self._hosts.sharing(client), self._seconds)
        companions: list[str] = []
        if client in self._alone or len(host.clients) == 1:
            return companions
        while len(companions) < size - 1 and self._queue[0] not in self._alone:
            if not self._hosts.serves(host, self._queue[0]):
                break
            companions.append(self._queue.popleft())
        return companions

    def _time_left(self) -> float | None:
        ends = [end for end in (self._deadline, self._hosts.next_patience()) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _answer(self, ref: Any) -> None:
        """A call to an actor has ended: on to the screen with its updates, or its clients are lost."""
        bundle = self._pending.pop(ref)
        self._hosts.release(bundle.host)
        try:
            receipts = ray.get(ref)
        except ObjectLostError as error:
            raise ServerLostError(f"the published state was lost with the server's node ({reason(error)})") from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._hosts.died(bundle.host, reason(error))
            self._failed(bundle.clients, reason(error))
            return
        if bundle.clients:
            mean = fmean(receipt.metrics["seconds"] for receipt in receipts)
            self._seconds = max(mean, _FADING * (self._seconds or 0.0))
            answer = self._server.screen(bundle.clients, bundle.receipts, bundle.models)
            self._screening[answer] = (bundle, receipts)

    def _failed(self, clients: Sequence[str], why: str) -> None:
        if len(clients) == 1:
            self._events.append(Lost(clients[0], why))
            return
        # Whose fault was it? Each goes again, alone; a bundle that fails is no client's failed attempt.
        self._alone.update(clients)
        self._queue.extendleft(reversed(clients))

    def _screened(self, ref: Any) -> None:
        bundle, receipts = self._screening.pop(ref)
        try:
            refusals = self._server.ask(lambda: ref)
        except ObjectLostError:
            refusals = ["its weights were lost with its node"] * len(receipts)
        for place, (client, receipt, refusal) in enumerate(zip(bundle.clients, receipts, refusals, strict=True)):
            self._events.append(Arrival(client, receipt, Weights(bundle.receipts, bundle.models, place, refusal)))

    def _give_up(self) -> None:
        """The deadline has passed: all who are still out are lost, whatever they are at."""
        text = f"no answer within federation.deadline_s={self._config.federation.deadline_s:g}"
        for ref, bundle in list(self._pending.items()):
            if bundle.clients:
                del self._pending[ref]
                self._hosts.release(bundle.host)
                bundle.host.late = ref
                bundle.host.handle.cancel.remote(self._round)
                self._events.extend(Lost(client, text, late=True) for client in bundle.clients)
        while self._queue:
            self._events.append(Lost(self._queue.popleft(), text, late=True))
