"""[3] A client: its private rows and its networks, resident as long as the run.

A plain class; the runtime makes it a Ray actor. It answers with weights, counts and metrics, never with rows.
One worker may act for several virtual clients.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config import Config, client_ids
from fedppd_ray.core.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.data.batches import Shard
from fedppd_ray.data.datasets import Dataset, load
from fedppd_ray.data.partition import Rows, partition
from fedppd_ray.evaluation.predictive import HeldOut
from fedppd_ray.methods import build_method


class ClientWorker:
    def __init__(self, config: Config, clients: Sequence[str], device: torch.device | str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self._data = load(config.data.name, config.data.root)
        self._rows = _own_rows(config, self._data, clients)
        self._shards: dict[str, Shard] = {}
        self._method = build_method(config, self._device)
        self._held_out: HeldOut | None = None
        self._cancelled_round = 0

    def describe(self) -> list[ClientInfo]:
        classes = len(self._data.info.classes)
        return [
            ClientInfo(
                client,
                len(rows),
                tuple(np.bincount(self._data.train.labels[rows], minlength=classes).tolist()),
            )
            for client, rows in self._rows.items()
        ]

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
        if client not in self._shards:
            rows = self._rows[client]
            train = self._data.train
            augment = self._config.client.augment == "crop_flip"
            self._shards[client] = Shard(train.images[rows], train.labels[rows], self._data.info, self._device, augment)
        return self._shards[client]


def _own_rows(config: Config, data: Dataset, clients: Sequence[str]) -> dict[str, Rows]:
    """The rows of these clients only; the others' are forgotten at once."""
    everyone = client_ids(config.federation.clients)
    split = partition(np.asarray(data.train.labels), len(data.info.classes), config.data, len(everyone), config.seed)
    return {client: rows for client, rows in zip(everyone, split.clients, strict=True) if client in clients}
