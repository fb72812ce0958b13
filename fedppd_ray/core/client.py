"""[3] A client: its private rows and its networks, resident as long as the run.

A plain class; the runtime makes it a Ray actor. It answers with weights, counts and metrics, never with rows.
One worker may act for several virtual clients.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config import Config
from fedppd_ray.core.labelling import Rows, Uncertainty, labelled_rows
from fedppd_ray.core.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.data.batches import Shard
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.data.parts import Split
from fedppd_ray.evaluation.metrics import entropy
from fedppd_ray.evaluation.predictive import BATCH, HeldOut
from fedppd_ray.methods import build_method


class ClientWorker:
    def __init__(
        self,
        config: Config,
        clients: Sequence[str],
        device: torch.device | str = "cpu",
        ranked_by: Sequence[GlobalState] = (),
    ) -> None:
        """`ranked_by`, active learning: the global models that ranked the clients' pools so far, in order."""
        self._config = config
        self._ranked_by = tuple(ranked_by)
        self._clients = tuple(clients)
        self._device = torch.device(device)
        self._holdings = Holdings(config, clients)
        self._labelled: dict[str, Rows] = {}
        self._shards: dict[str, Shard] = {}
        self._method = build_method(config, self._device)
        self._held_out: HeldOut | None = None
        self._cancelled_round = 0

    def describe(self, clients: Sequence[str] | None = None) -> list[ClientInfo]:
        """Counts, of all its clients or of some."""
        classes = len(self._config.dataset.classes)
        infos = []
        for client in clients or self._clients:
            labels = self._training_rows(client).labels
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
        split = self._training_rows(client)
        augment = self._config.client.augment == "crop_flip"
        shard = Shard(split.images, split.labels, self._config.dataset, self._device, augment)
        if len(self._clients) == 1:  # one that acts for a thousand would hold the whole data set in the end
            self._shards[client] = shard
        return shard

    def _training_rows(self, client: str) -> Split:
        """All that it holds; in active learning what is labelled by now."""
        split, active = self._holdings.of(client), self._config.active
        if active is None:
            return split
        pixels = Shard(split.images, None, self._config.dataset, self._device)

        def ranking(state: GlobalState) -> Uncertainty:
            # Made when it is its turn: all rankings share the method's networks.
            return lambda rows: self._entropy(state, pixels, rows)

        if client not in self._labelled:
            rankings = [ranking(state) for state in self._ranked_by]
            self._labelled[client] = labelled_rows(active, len(split), self._config.seed, client, rankings)
        rows = self._labelled[client]
        return Split(split.images[rows], split.labels[rows])

    def _entropy(self, state: GlobalState, pixels: Shard, rows: Rows) -> NDArray[np.float64]:
        """Predictive entropy of the client's own rows under a global model."""
        predict = self._method.predictor(state.models)
        parts = torch.from_numpy(rows).to(self._device).split(BATCH)
        return np.concatenate([entropy(predict(pixels.inputs(part)).cpu().numpy()) for part in parts])
