"""The round's executor on Ray: long-lived actors for clients and server, weights by reference."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from fedppd_ray.config import Config
from fedppd_ray.core.executor import Arrival, Lost
from fedppd_ray.core.types import ClientInfo, GlobalState, Receipt
from fedppd_ray.errors import ServerLostError
from fedppd_ray.runtime.actors import ServerActor
from fedppd_ray.runtime.hosts import Host, Hosts, cluster_nodes, plan_hosts, reason
from fedppd_ray.runtime.resources import allocate

log = logging.getLogger(__name__)
_POLL_S = 0.2


class RayExecutor:
    """Needs `ray.init` to have been called."""

    def __init__(self, config: Config, clients: Sequence[str], ranked_by: Sequence[GlobalState] = ()) -> None:
        self._config = config
        nodes = cluster_nodes()
        plan = plan_hosts(config, clients)
        wishes = {name: config.overrides_for(hosted[0]) for name, hosted in plan.items() if len(hosted) == 1}
        allocation = allocate(list(plan), nodes, config.resources, wishes)
        # All actors are requested before any is waited for: they start side by side.
        server = allocation.server
        self._server = ServerActor.options(num_cpus=server.cpus, num_gpus=server.gpus).remote(config, server)
        self._hosts = Hosts(config, plan, allocation, nodes, [ray.put(state) for state in ranked_by])
        try:
            self._hosts.wait_until_ready({self._server.ready.remote(): "the server"})
        except BaseException:
            self.close()
            raise
        self._state_ref: Any = None
        self._round = 0
        self._deadline: float | None = None
        self._queue: deque[str] = deque()  # told to start, waiting for a host
        # Receipt reference → (client, host, weights reference); the client is None where nobody waits any more.
        self._pending: dict[Any, tuple[str | None, Host, Any]] = {}

    def close(self) -> None:
        ray.kill(self._server)
        self._hosts.close()

    # ---- the server

    def install(self, state: GlobalState | None) -> None:
        """Waits for a server that is being started anew."""
        limit = time.monotonic() + self._config.resources.start_timeout_s
        while True:
            try:
                self._ask_server(lambda: self._server.install.remote(state))
                return
            except ServerLostError:
                if time.monotonic() > limit:
                    raise
                time.sleep(_POLL_S)

    def state(self) -> GlobalState:
        return self._ask_server(lambda: self._server.state.remote())

    def begin(self, round_id: int) -> None:
        # A round that is begun again (the server died) has no use for the answers of the first attempt.
        self._queue.clear()
        self._pending = {ref: (None, host, models) for ref, (_, host, models) in self._pending.items()}
        # The driver reads the marker only; the state itself goes to the clients by reference.
        marker, self._state_ref = self._server.publish.options(num_returns=2).remote(round_id)
        self._ask_server(lambda: marker)
        self._round = round_id
        limit = self._config.federation.deadline_s
        self._deadline = None if limit is None else time.monotonic() + limit

    def refusal(self, arrival: Arrival) -> str | None:
        client, receipt, models = arrival.client, arrival.receipt, arrival.payload
        try:
            return self._ask_server(lambda: self._server.screen.remote(client, receipt, models))
        except ObjectLostError:
            return "its weights were lost with its node"

    def fold(self, arrival: Arrival) -> Receipt:
        try:
            return self._ask_server(lambda: self._server.accept.remote(arrival.receipt, arrival.payload))
        except ObjectLostError:
            raise ServerLostError(f"the weights of {arrival.client} were lost with its node") from None

    def finish(self) -> None:
        self._ask_server(lambda: self._server.finish.remote())

    def _ask_server(self, call: Callable[[], Any]) -> Any:
        try:
            return ray.get(call())
        except RayActorError as error:
            raise ServerLostError(f"the server's process died ({reason(error)})") from None

    # ---- the clients

    def describe(self) -> list[ClientInfo]:
        return self._hosts.describe()

    def start(self, client: str) -> None:
        self._queue.append(client)

    def next_event(self) -> Arrival | Lost:
        while True:
            self._dispatch()
            for client in self._queue:
                if trouble := self._hosts.hopeless(client):
                    self._queue.remove(client)
                    return Lost(client, trouble, late=True)
            pings = self._hosts.pings()
            ready, _ = ray.wait([*self._pending, *pings], timeout=self._time_left(), fetch_local=False)
            if not ready:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    return self._give_up()
            elif ready[0] in pings:
                self._hosts.ping_answered(pings[ready[0]])
            elif event := self._answer(ready[0]):
                return event

    def _dispatch(self) -> None:
        """Send off the queued clients that have a free host, in their order."""
        held_back: deque[str] = deque()
        while self._queue:
            client = self._queue.popleft()
            host = self._hosts.free_for(client)
            if host is None:
                held_back.append(client)
                continue
            receipt, models = host.handle.train.options(num_returns=2).remote(client, self._state_ref)
            host.busy = True
            self._pending[receipt] = (client, host, models)
        self._queue = held_back

    def _time_left(self) -> float | None:
        ends = [end for end in (self._deadline, self._hosts.next_patience()) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _answer(self, ref: Any) -> Arrival | Lost | None:
        client, host, models = self._pending.pop(ref)
        host.busy = False
        try:
            receipt = ray.get(ref)
        except ObjectLostError as error:
            raise ServerLostError(f"the published state was lost with the server's node ({reason(error)})") from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._hosts.died(host, reason(error))
            return None if client is None else Lost(client, reason(error))
        return None if client is None else Arrival(client, receipt, models)

    def _give_up(self) -> Lost:
        """The deadline has passed: one of those who are still out, whatever they are at."""
        text = f"no answer within federation.deadline_s={self._config.federation.deadline_s:g}"
        for ref, (client, host, _) in self._pending.items():
            if client is not None:
                del self._pending[ref]
                host.busy = False
                host.late = ref
                host.handle.cancel.remote(self._round)
                return Lost(client, text, late=True)
        return Lost(self._queue.popleft(), text, late=True)

    # ---- evaluation

    def predict(self, split: str) -> NDArray[np.float64]:
        """Parts of the held-out data on as many actors as there are cores; the server where one fails."""
        actors = self._hosts.evaluators()
        if actors:
            state = self._server.state.remote()
            parts = [actor.predict.remote(state, split, part, len(actors)) for part, actor in enumerate(actors)]
            try:
                return np.concatenate(ray.get(parts))
            except RayError as error:
                log.warning("evaluating on the server alone: %s", reason(error))
        return self._ask_server(lambda: self._server.predict.remote(split))
