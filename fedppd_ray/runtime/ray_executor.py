"""The round's executor on Ray: long-lived actors for clients and server, weights by reference."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runtime.actors import ServerActor
from fedppd_ray.runtime.client_pool import RayClientPool
from fedppd_ray.runtime.hosts import Hosts, cluster_nodes, plan_hosts, reason
from fedppd_ray.runtime.resources import Share, allocate
from fedppd_ray.runtime.server_link import RayServerLink

log = logging.getLogger(__name__)


class RayExecutor:
    """Needs `ray.init` to have been called."""

    def __init__(
        self, config: Config, clients: Sequence[str], acquisition_states: Sequence[GlobalState] = (), run: str = ""
    ) -> None:
        """`run`: what sites are told this run is."""
        nodes = cluster_nodes()
        plan = plan_hosts(config, clients)
        wishes = {name: config.overrides_for(hosted[0]) for name, hosted in plan.items() if len(hosted) == 1}
        sites = [name for name, wish in wishes.items() if wish.site is not None]
        allocation = allocate([name for name in plan if name not in sites], nodes, config.resources, wishes)
        # A site works in its own house.
        allocation = replace(allocation, clients={**allocation.clients, **dict.fromkeys(sites, Share(0.0, 0.0))})
        # All actors are requested before any is waited for: they start side by side.
        server = allocation.server
        handle = ServerActor.options(num_cpus=server.cpus, num_gpus=server.gpus).remote(config, server)
        self.hosts = Hosts(config, plan, allocation, nodes, [ray.put(state) for state in acquisition_states], run)
        self.server = RayServerLink(handle, config.resources.start_timeout_s)
        try:
            self.hosts.wait_until_ready({handle.ready.remote(): "the server"})
        except BaseException:
            self.close()
            raise
        self.clients = RayClientPool(config, self.hosts, self.server)
        self.evaluation = RayEvaluator(self.hosts, self.server)

    def close(self) -> None:
        ray.kill(self.server.handle)
        self.hosts.close()


class RayEvaluator:
    def __init__(self, hosts: Hosts, server: RayServerLink) -> None:
        self._hosts = hosts
        self._server = server

    def predict(self, split: str) -> NDArray[np.float64]:
        """Parts of the held-out data on as many actors as there are cores; the server where one fails."""
        actors = self._hosts.evaluators()
        if actors:
            state = self._server.handle.broadcast.remote()
            parts = [actor.predict.remote(state, split, part, len(actors)) for part, actor in enumerate(actors)]
            try:
                return np.concatenate(ray.get(parts))
            except RayError as error:
                log.warning("evaluating on the server alone: %s", reason(error))
        return self._server.ask(lambda: self._server.handle.predict.remote(split))
