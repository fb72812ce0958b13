"""[3][5] The client and the server as Ray actors: plain workers plus the device that Ray assigned."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import ray
import torch
from ray import ObjectRef

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models, Receipt
from fedppd_ray.runtime.resources import Share, choose_device
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.server import ServerWorker

log = logging.getLogger(__name__)


def _use_assigned_device(share: Share) -> str:
    torch.set_num_threads(share.threads)
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    choice = choose_device(assigned, share.gpus, torch.cuda.is_available())
    if choice.warning:
        log.warning(choice.warning)
    if choice.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(choice.memory_fraction, 0)
    return choice.device


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


class RayClient(ClientWorker):
    def __init__(
        self, config: Config, clients: Sequence[str], share: Share, acquisition_states: Sequence[ObjectRef]
    ) -> None:
        super().__init__(config, clients, _use_assigned_device(share), ray.get(list(acquisition_states)))

    def train(self, clients: Sequence[str], state: GlobalState) -> tuple[list[Receipt], list[Models]]:
        """`local_update` of each, as two objects: the driver reads the receipts, the weights go to the server alone."""
        updates = [self._timed(client, state) for client in clients]
        return [update.receipt for update in updates], [update.models for update in updates]

    def _timed(self, client: str, state: GlobalState) -> ClientUpdate:
        began = time.perf_counter()
        update = self.local_update(client, state)
        metrics = {**update.receipt.metrics, "seconds": time.perf_counter() - began}
        return replace(update, receipt=replace(update.receipt, metrics=metrics))

    @ray.method(concurrency_group="control")
    def cancel(self, round_id: int) -> None:
        super().cancel(round_id)

    @ray.method(concurrency_group="control")
    def ready(self) -> str:
        """Answered as soon as the constructor is through: the node's id."""
        return _node()

    @ray.method(concurrency_group="control")
    def process(self) -> int:
        """Its process id, answered while it trains: for operators and for tests that kill it."""
        return os.getpid()


class RayServer(ServerWorker):
    def __init__(self, config: Config, share: Share) -> None:
        super().__init__(config, _use_assigned_device(share))

    def ready(self) -> str:
        return _node()

    def publish(self, round_id: int) -> tuple[int, GlobalState]:
        """`begin` as two objects: a marker for the driver, the state for the clients."""
        return round_id, self.begin(round_id)

    def screen(self, clients: Sequence[str], receipts: Sequence[Receipt], models: Sequence[Models]) -> list[str | None]:
        """Of each client, why its update may not count, or None."""
        updates = map(ClientUpdate, receipts, models)
        return [self.refusal(client, update) for client, update in zip(clients, updates, strict=True)]

    def accept(self, places: Sequence[int], receipts: Sequence[Receipt], models: Sequence[Models]) -> None:
        """Fold the updates at these places of a bundle, in this order."""
        for place in places:
            self.fold(ClientUpdate(receipts[place], models[place]))


# Restarted without end, never retried by Ray itself: the round loop knows what a retry means.
ClientActor = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"control": 1})(RayClient)
ServerActor = ray.remote(max_restarts=-1, max_task_retries=0)(RayServer)
