"""The client actors: who hosts which clients, who is free, who died and may come back."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from fedppd_ray.config.schema import ClientOverrides, Config
from fedppd_ray.errors import ResourceError
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.runtime.actors import ClientActor
from fedppd_ray.runtime.resources import Allocation, NodeResources, Share, describe
from fedppd_ray.runtime.site_actors import SiteActor

log = logging.getLogger(__name__)
_POLL_S = 0.2


def plan_hosts(config: Config, clients: Sequence[str]) -> dict[str, list[str]]:
    """Actor name → its clients. One actor per client, or `resources.actors` that share all clients without wishes.

    A client with a node, data or resources of its own always has an actor of its own.
    """
    wanted = config.resources.actors
    special = {client for client in clients if config.overrides_for(client) != ClientOverrides()}
    common = [client for client in clients if client not in special]
    if wanted == "auto" or wanted >= len(common):
        return {client: [client] for client in clients}
    pool = {f"worker-{index:02d}": common for index in range(wanted)}
    return {**pool, **{client: [client] for client in clients if client in special}}


@dataclass(eq=False)
class Host:
    """A client actor, and what is known of it."""

    name: str
    handle: Any
    share: Share
    clients: Sequence[str]
    has_own_data: bool
    elsewhere: bool = False  # a site: its work takes no core of this cluster
    node: str = ""
    busy: bool = False
    late: Any = None  # a task that missed its deadline and was told to stop
    ping: Any = None  # a sign of life that is waited for while the process is replaced
    patience: float = 0.0  # how long, in monotonic time
    trouble: str = ""


class Hosts:
    def __init__(
        self,
        config: Config,
        plan: Mapping[str, Sequence[str]],
        allocation: Allocation,
        nodes: list[NodeResources],
        acquisition_states: Sequence[Any] = (),
        run: str = "",
    ) -> None:
        """`acquisition_states`: references to the global models that ranked the clients' pools (active learning).

        `run`: what sites are told this run is.
        """
        self._config = config
        self._run = run
        self._acquisition_states = list(acquisition_states)
        self._nodes = nodes
        self._cores = {node.id: max(1, int(node.cpus)) for node in nodes}
        self._hosts = [self._create(name, clients, allocation.clients[name]) for name, clients in plan.items()]
        self._working: Counter[str] = Counter()  # node → hosts at work on its cores
        self._of: dict[str, list[Host]] = {}
        for host in self._hosts:
            for client in host.clients:
                self._of.setdefault(client, []).append(host)

    def _create(self, name: str, clients: Sequence[str], share: Share) -> Host:
        own = self._config.overrides_for(clients[0]) if len(clients) == 1 else ClientOverrides()
        if own.site is not None:
            return Host(
                name, SiteActor.remote(self._config, clients[0], self._run), share, clients, True, elsewhere=True
            )
        options: dict[str, Any] = {"num_cpus": share.cpus, "num_gpus": share.gpus}
        if own.label_selector:
            options["label_selector"] = dict(own.label_selector)
        handle = ClientActor.options(**options).remote(self._config, clients, share, self._acquisition_states)
        return Host(name, handle, share, clients, own.data is not None)

    # ---- start and end

    def wait_until_ready(self, others: Mapping[Any, str]) -> None:
        """Until every actor, and whatever `others` refers to, has started; within the time limit."""
        waiting: dict[Any, Host | str] = {host.handle.ready.remote(): host for host in self._hosts}
        waiting.update(others)
        limit = self._config.resources.start_timeout_s
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=limit)
        if late:
            raise ResourceError(self._too_late([waiting[ref] for ref in late], len(waiting), limit))
        for ref in ready:
            who = waiting[ref]
            name = who if isinstance(who, str) else who.name
            try:
                node = ray.get(ref)
            except RayError as error:
                raise ResourceError(f"{name} could not start: {reason(error)}") from None
            if isinstance(who, Host):
                who.node = node

    def _too_late(self, late: list[Host | str], total: int, limit: float) -> str:
        names = [who if isinstance(who, str) else who.name for who in late]
        asked = next((who for who in late if isinstance(who, Host)), self._hosts[0])
        selector = self._config.overrides_for(asked.clients[0]).label_selector if len(asked.clients) == 1 else {}
        where = f" on a node with labels {dict(selector)}" if selector else ""
        free = {key: f"{value:g}" for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
        return (
            f"{len(names)} of {total} actors did not start within {limit:g} s ({', '.join(names[:4])}"
            f"{', …' if len(names) > 4 else ''}); {asked.name} asks for {asked.share.cpus:g} CPU and "
            f"{asked.share.gpus:g} GPU{where}; {describe(self._nodes)}; free now: {free}; lower resources.*, free the "
            "cluster, or raise resources.start_timeout_s"
        )

    def close(self) -> None:
        for host in self._hosts:
            ray.kill(host.handle)

    def describe(self) -> list[ClientInfo]:
        """Counts of every client, each told by its first host."""
        told: dict[str, list[str]] = {}
        for client, hosts in self._of.items():
            told.setdefault(hosts[0].name, []).append(client)
        limit = time.monotonic() + self._config.resources.start_timeout_s
        while True:
            asked = {
                host.name: host.handle.describe.remote(told[host.name]) for host in self._hosts if host.name in told
            }
            try:
                answers = ray.get(list(asked.values()), timeout=max(0.0, limit - time.monotonic()))
                return sorted((info for answer in answers for info in answer), key=lambda info: info.client)
            except GetTimeoutError:
                silent = [name for name, ref in asked.items() if not ray.wait([ref], timeout=0)[0]]
                raise ResourceError(f"{', '.join(silent)}: started but does not answer; look at the node") from None
            except RayActorError as error:  # a process that died right after its start is being replaced
                log.warning("asking again for the clients' counts: %s", reason(error))
                time.sleep(_POLL_S)
            except RayError as error:
                raise ResourceError(f"a client could not describe its data: {reason(error)}") from None

    # ---- placing work

    def all_busy(self) -> bool:
        """Whether no host at all can take work: spares a look at every client that waits."""
        return not any(not host.busy and host.ping is None and self._has_core(host) for host in self._hosts)

    def sharing(self, client: str) -> int:
        """How many hosts this client has the choice of."""
        return len(self._of[client])

    def serves(self, host: Host, client: str) -> bool:
        return host in self._of[client]

    def free_for(self, client: str) -> Host | None:
        """A host that can take this client's work now."""
        for host in self._of[client]:
            if host.late is not None:
                self._stop_late(host)
            if not host.busy and host.ping is None and self._has_core(host):
                return host
        return None

    def _has_core(self, host: Host) -> bool:
        """As many clients work at once on a node as it has cores, unless they work on GPUs.

        Ten busy processes on two cores take turns in each other's caches; two at a time they finish sooner.
        """
        if not _takes_core(host):
            return True
        if host.node not in self._cores:  # a node that joined later
            self._cores |= {node.id: max(1, int(node.cpus)) for node in cluster_nodes()}
        return self._working[host.node] < self._cores.get(host.node, 1)

    def occupy(self, host: Host) -> None:
        host.busy = True
        self._working[host.node] += _takes_core(host)

    def release(self, host: Host) -> None:
        host.busy = False
        self._working[host.node] -= _takes_core(host)

    def _stop_late(self, host: Host) -> None:
        """A host that still works on an answer nobody waits for is stopped the hard way."""
        if not ray.wait([host.late], timeout=0, fetch_local=False)[0]:
            log.warning("%s did not stop after its deadline; its process is started anew", host.name)
            ray.kill(host.handle, no_restart=False)
            self.died(host, "did not stop after its deadline")
        host.late = None

    # ---- deaths

    def died(self, host: Host, trouble: str) -> None:
        """Its process is gone. A task sent before the new one is up would be lost: wait for a sign of life."""
        host.trouble = trouble
        host.patience = time.monotonic() + self._config.resources.start_timeout_s
        host.ping = host.handle.ready.remote()

    def pings(self) -> dict[Any, Host]:
        return {host.ping: host for host in self._hosts if host.ping is not None}

    def ping_answered(self, host: Host) -> None:
        """The process is back, or its replacement failed and is tried again."""
        try:
            host.node = ray.get(host.ping)
            host.ping = None
        except RayActorError as error:
            host.trouble = reason(error)
            time.sleep(_POLL_S)
            host.ping = host.handle.ready.remote()

    def next_patience(self) -> float | None:
        """When the next wait for a dead host ends, in monotonic time."""
        ends = [host.patience for host in self.pings().values() if host.patience > time.monotonic()]
        return min(ends, default=None)

    def hopeless(self, client: str) -> str | None:
        """Why no host of this client can be waited for any longer, or None. They are welcome back later."""
        hosts = self._of[client]
        if any(host.ping is None or host.patience > time.monotonic() for host in hosts):
            return None
        return f"{hosts[0].name} did not come back: {hosts[0].trouble}"

    def site_handles(self) -> dict[str, Any]:
        """Site → the actor that holds its mailbox."""
        sites = self._config.sites()
        return {sites[host.clients[0]]: host.handle for host in self._hosts if host.elsewhere}

    # ---- evaluation

    def askable(self) -> list[tuple[Host, list[str]]]:
        """Hosts that are there, and of which clients each is asked: those of several hosts are shared out."""
        told: dict[Host, list[str]] = {}
        for place, client in enumerate(sorted(self._of)):
            there = [host for host in self._of[client] if host.ping is None and not _still_late(host)]
            if there:
                told.setdefault(there[place % len(there)], []).append(client)
        return list(told.items())

    def evaluators(self) -> list[Any]:
        """Handles of living actors that see the public data, at most one a core."""
        fit = [host.handle for host in self._hosts if not host.has_own_data and host.ping is None and host.late is None]
        return fit[: max(1, int(sum(node.cpus for node in self._nodes)))]


def _still_late(host: Host) -> bool:
    return host.late is not None and not ray.wait([host.late], timeout=0, fetch_local=False)[0]


def _takes_core(host: Host) -> bool:
    return host.share.gpus == 0 and not host.elsewhere


def cluster_nodes() -> list[NodeResources]:
    return [
        NodeResources(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
            node.get("Labels", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def reason(error: BaseException) -> str:
    """One line for the log: the user's exception where there is one, else what became of the actor."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
