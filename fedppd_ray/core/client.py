"""[3] A client: its private rows and its networks, resident as long as the run.

A plain class; the runtime makes it a Ray actor. It answers with weights, counts and metrics, never with rows.
One worker may act for several virtual clients.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config import Config
from fedppd_ray.core.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.data.batches import Shard
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.evaluation.predictive import HeldOut
from fedppd_ray.methods import build_method


class ClientWorker:
    def __init__(self, config: Config, clients: Sequence[str], device: torch.device | str = "cpu") -> None:
        self._config = config
        self._clients = tuple(clients)
        self._device = torch.device(device)
        self._holdings = Holdings(config, clients)
        self._shards: dict[str, Shard] = {}
        self._method = build_method(config, self._device)
        self._held_out: HeldOut | None = None
        self._cancelled_round = 0

    def describe(self, clients: Sequence[str] | None = None) -> list[ClientInfo]:
        """Counts, of all its clients or of some."""
        classes = len(self._config.dataset.classes)
        infos = []
        for client in clients or self._clients:
            labels = self._holdings.of(client).labels
            infos.append(ClientInfo(client, len(labels), tuple(np.bincount(labels, minlength=classes).tolist())))
        return infos

    def local_update(self, client: str, state: GlobalState) -> ClientUpdate:
        round_id = state.round + 1
        shard = self._shard(client)
        result = self._method.local_update(client, state, shard, lambda: self._cancelled_round >= round_id)
        return ClientUpdate(Receipt(client, round_id, len(shard), result.metrics), result.models)

    def cancel(self, round_id: int) -> None:
        """Give up this round and earlier ones; called from another thread while `local_update` runs."""
        self._cancelled_round = max(self._cancelled_round, round_id)

    def predict(self, state: GlobalState, split: str, part: int, parts: int) -> NDArray[np.float64]:
        """Log-probabilities on a part of the public held-out data: evaluation is shared among the actors."""
        if self._held_out is None:
            self._held_out = HeldOut(self._config, self._device)
        return self._held_out.log_probabilities(self._method.predictor(state.models), split, part, parts)

    def _shard(self, client: str) -> Shard:
        if client in self._shards:
            return self._shards[client]
        split = self._holdings.of(client)
        augment = self._config.client.augment == "crop_flip"
        shard = Shard(split.images, split.labels, self._config.dataset, self._device, augment)
        if len(self._clients) == 1:  # one that acts for a thousand would hold the whole data set in the end
            self._shards[client] = shard
        return shard
