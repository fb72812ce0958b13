"""The round's executor on Ray: one long-lived actor a client, one for the server, weights by reference."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from fedppd_ray.config import Config
from fedppd_ray.core.executor import Arrival, Lost
from fedppd_ray.core.types import ClientInfo, GlobalState, Receipt
from fedppd_ray.errors import ResourceError, ServerLostError
from fedppd_ray.runtime.actors import ClientActor, ServerActor
from fedppd_ray.runtime.resources import Allocation, NodeResources, allocate, describe

log = logging.getLogger(__name__)
_POLL_S = 0.2


class RayExecutor:
    """Needs `ray.init` to have been called."""

    def __init__(self, config: Config, clients: Sequence[str]) -> None:
        self._config = config
        self._nodes = cluster_nodes()
        allocation = allocate(clients, self._nodes, config.resources)
        server = allocation.server
        # All actors are requested before any is waited for: they start side by side.
        self._server = ServerActor.options(num_cpus=server.cpus, num_gpus=server.gpus).remote(config, server)
        self._clients = {
            client: ClientActor.options(num_cpus=share.cpus, num_gpus=share.gpus).remote(config, [client], share)
            for client, share in allocation.clients.items()
        }
        node_of = self._wait_until_ready(allocation)
        self._slots = Slots(self._nodes, node_of, allocation)
        self._state_ref: Any = None
        self._round = 0
        self._deadline: float | None = None
        self._queue: deque[str] = deque()  # told to start, waiting for a core
        self._pending: dict[Any, tuple[str, Any]] = {}  # receipt reference → (client, weights reference)
        self._overdue: dict[str, Any] = {}  # client → receipt reference of an answer nobody waits for
        self._broken: set[str] = set()  # clients whose process died and may not be back yet
        self._returning: dict[Any, tuple[str, float]] = {}  # sign-of-life reference → (client, time limit)

    # ---- start and end

    def _wait_until_ready(self, allocation: Allocation) -> dict[str, str]:
        """Where each client's actor came to live."""
        waiting = {actor.ready.remote(): name for name, actor in self._clients.items()}
        waiting[self._server.ready.remote()] = "server"
        limit = self._config.resources.start_timeout_s
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=limit)
        if late:
            self.close()
            names = sorted(waiting[ref] for ref in late)
            free = {key: f"{value:g}" for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            asked = next(iter(allocation.clients.values()))
            raise ResourceError(
                f"{len(names)} of {len(waiting)} actors did not start within {limit:g} s ({', '.join(names[:4])}"
                f"{', …' if len(names) > 4 else ''}); a client asks for {asked.cpus:g} CPU and {asked.gpus:g} GPU, "
                f"{describe(self._nodes)}, free now: {free}; lower resources.*, free the cluster, or raise "
                "resources.start_timeout_s"
            )
        nodes: dict[str, str] = {}
        for ref in ready:
            try:
                nodes[waiting[ref]] = ray.get(ref)
            except RayError as error:
                self.close()
                raise ResourceError(f"{waiting[ref]} could not start: {_reason(error)}") from None
        return nodes

    def close(self) -> None:
        for actor in [self._server, *self._clients.values()]:
            ray.kill(actor)

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
        self._abandon_pending()
        # The driver reads the marker only; the state itself goes to the clients by reference.
        marker, self._state_ref = self._server.publish.options(num_returns=2).remote(round_id)
        self._ask_server(lambda: marker)
        self._round = round_id
        limit = self._config.federation.deadline_s
        self._deadline = None if limit is None else time.monotonic() + limit

    def refusal(self, arrival: Arrival) -> str | None:
        client, receipt, models = arrival.client, arrival.receipt, arrival.payload
        return self._ask_server(lambda: self._server.screen.remote(client, receipt, models))

    def fold(self, arrival: Arrival) -> Receipt:
        return self._ask_server(lambda: self._server.accept.remote(arrival.receipt, arrival.payload))

    def finish(self) -> None:
        self._ask_server(lambda: self._server.finish.remote())

    def _ask_server(self, call: Callable[[], Any]) -> Any:
        try:
            return ray.get(call())
        except RayTaskError:
            raise
        except RayActorError as error:
            raise ServerLostError(f"the server's process died ({_reason(error)})") from None

    # ---- the clients

    def describe(self) -> list[ClientInfo]:
        asked = {client: actor.describe.remote() for client, actor in self._clients.items()}
        try:
            answers = ray.get(list(asked.values()), timeout=self._config.resources.start_timeout_s)
        except GetTimeoutError:
            silent = [client for client, ref in asked.items() if not ray.wait([ref], timeout=0)[0]]
            raise ResourceError(f"{', '.join(silent)} started but does not answer; look at its node") from None
        return [info for answer in answers for info in answer]

    def start(self, client: str) -> None:
        self._make_free(client)
        if client in self._broken:
            # A task sent to a process that is still being replaced is lost at once: wait for a sign of life.
            limit = time.monotonic() + self._config.resources.start_timeout_s
            self._returning[self._clients[client].ready.remote()] = (client, limit)
        else:
            self._queue.append(client)
            self._dispatch()

    def _dispatch(self) -> None:
        """Send off the queued clients whose node has a core to spare, in their order."""
        held_back: deque[str] = deque()
        while self._queue:
            client = self._queue.popleft()
            if self._slots.take(client):
                receipt, models = self._clients[client].train.options(num_returns=2).remote(client, self._state_ref)
                self._pending[receipt] = (client, models)
            else:
                held_back.append(client)
        self._queue = held_back

    def next_event(self) -> Arrival | Lost:
        event: Arrival | Lost | None = None
        while event is None:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _ = ray.wait([*self._pending, *self._returning], timeout=left)
            if not ready:
                event = self._give_up()
            elif ready[0] in self._pending:
                event = self._answer(ready[0])
            else:
                event = self._back_again(ready[0])
        return event

    def _answer(self, ref: Any) -> Arrival | Lost:
        client, models = self._pending.pop(ref)
        self._slots.give_back(client)
        self._dispatch()
        try:
            return Arrival(client, ray.get(ref), models)
        except RayActorError as error:
            self._broken.add(client)
            return Lost(client, _reason(error))
        except RayError as error:
            return Lost(client, _reason(error))

    def _back_again(self, ref: Any) -> Lost | None:
        """A client's process is back, or still on its way, or has taken too long."""
        client, limit = self._returning.pop(ref)
        try:
            node = ray.get(ref)
        except RayActorError as error:
            if time.monotonic() > limit:
                return Lost(client, f"did not come back: {_reason(error)}", late=True)
            time.sleep(_POLL_S)
            self._returning[self._clients[client].ready.remote()] = (client, limit)
            return None
        self._slots.move(client, node)
        self._broken.discard(client)
        self._queue.append(client)
        self._dispatch()
        return None

    def _give_up(self) -> Lost:
        """The deadline has passed: one of those who are still out, whatever they are at."""
        if self._pending:
            receipt, (client, _) = next(iter(self._pending.items()))
            del self._pending[receipt]
            self._slots.give_back(client)
            self._clients[client].cancel.remote(self._round)
            self._overdue[client] = receipt
        elif self._returning:
            client, _ = self._returning.pop(next(iter(self._returning)))
        else:
            client = self._queue.popleft()
        return Lost(
            client,
            f"no answer within federation.deadline_s={self._config.federation.deadline_s:g}",
            late=True,
        )

    def _make_free(self, client: str) -> None:
        """A client that still works on an answer nobody waits for is stopped the hard way."""
        overdue = self._overdue.pop(client, None)
        if overdue is not None and not ray.wait([overdue], timeout=0)[0]:
            log.warning("%s did not stop after its deadline; its process is started anew", client)
            ray.kill(self._clients[client], no_restart=False)
            self._broken.add(client)

    def _abandon_pending(self) -> None:
        """Answers of a round that is begun again (the server died) must not hold up their clients."""
        for receipt, (client, _) in self._pending.items():
            self._overdue[client] = receipt
            self._slots.give_back(client)
        self._pending.clear()
        self._returning.clear()
        self._queue.clear()

    # ---- evaluation

    def predict(self, split: str) -> NDArray[np.float64]:
        """Parts of the held-out data on as many actors as there are cores; the server where one fails."""
        actors = list(self._clients.values())[: max(1, int(sum(node.cpus for node in self._nodes)))]
        state = self._server.state.remote()
        parts = [actor.predict.remote(state, split, part, len(actors)) for part, actor in enumerate(actors)]
        try:
            return np.concatenate(ray.get(parts))
        except RayError as error:
            log.warning("evaluating on the server alone: %s", _reason(error))
            answer: NDArray[np.float64] = self._ask_server(lambda: self._server.predict.remote(split))
            return answer


class Slots:
    """How many clients work at once on a node: as many as it has cores, unless they work on GPUs.

    Ten busy processes on two cores take turns in each other's caches; one after the other, two at a time, they
    finish sooner.
    """

    def __init__(self, nodes: Sequence[NodeResources], node_of: Mapping[str, str], allocation: Allocation) -> None:
        self._free = {node.id: max(1, int(node.cpus)) for node in nodes}
        self._node_of = dict(node_of)
        self._unlimited = {client for client, share in allocation.clients.items() if share.gpus > 0}

    def take(self, client: str) -> bool:
        if client in self._unlimited:
            return True
        node = self._node_of[client]
        if self._free[node] == 0:
            return False
        self._free[node] -= 1
        return True

    def move(self, client: str, node: str) -> None:
        """An actor that was started anew may live elsewhere, even on a node that joined later."""
        self._free.setdefault(node, 1)
        self._node_of[client] = node

    def give_back(self, client: str) -> None:
        if client not in self._unlimited:
            self._free[self._node_of[client]] += 1


def cluster_nodes() -> list[NodeResources]:
    return [
        NodeResources(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _reason(error: BaseException) -> str:
    """One line for the log: the user's exception where there is one, else what became of the actor."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
