"""Predictive distributions on data that no client trains on."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppd_ray.config import Config
from fedppd_ray.data.batches import Shard
from fedppd_ray.data.datasets import Images, Labels, load, load_ood
from fedppd_ray.data.partition import partition
from fedppd_ray.models.flat import FlatModel

# Normalised inputs → float64 log predictive probabilities.
Predictor = Callable[[Tensor], Tensor]

# Rows a forward pass. Parts of a split are cut at multiples of it, so that a row's batch, and with it every bit
# of its prediction, does not depend on how many processes share the work.
BATCH = 500


def network_predictor(model: FlatModel) -> Predictor:
    """One forward pass of one network."""
    model.module.eval()

    @torch.no_grad()
    def predict(inputs: Tensor) -> Tensor:
        return torch.log_softmax(model.module(inputs).double(), 1)

    return predict


class HeldOut:
    """The public held-out data of a run: test set, calibration set, unlabelled pool, out-of-distribution set."""

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self._data = load(config.data.name, config.data.root)
        self._partition = partition(
            np.asarray(self._data.train.labels),
            len(self._data.info.classes),
            config.data,
            config.federation.clients,
            config.seed,
        )

    def images(self, split: str) -> Images:
        if split == "test":
            return self._data.test.images
        if split == "calibration":
            return self._data.train.images[self._partition.calibration]
        if split == "ood":
            return self._ood
        raise ValueError(f"no split {split!r}")

    def labels(self, split: str) -> Labels:
        if split == "test":
            return np.asarray(self._data.test.labels)
        if split == "calibration":
            return np.asarray(self._data.train.labels[self._partition.calibration])
        raise ValueError(f"split {split!r} has no labels")

    def log_probabilities(self, predict: Predictor, split: str, part: int = 0, parts: int = 1) -> NDArray[np.float64]:
        """float64 log-probabilities of a split's rows, or of one of `parts` consecutive parts of it."""
        images = self.images(split)
        first, last = part_bounds(len(images), part, parts)
        pieces = []
        for start in range(first, last, BATCH):
            shard = Shard(images[start : min(start + BATCH, last)], None, self._data.info, self._device)
            pieces.append(predict(shard.inputs(torch.arange(len(shard), device=self._device))).cpu().numpy())
        classes = len(self._data.info.classes)
        return np.concatenate(pieces) if pieces else np.empty((0, classes))

    def server_pool(self) -> Shard:
        return self._pool

    @cached_property
    def _pool(self) -> Shard:
        rows = self._partition.server_pool
        augment = self._config.client.augment == "crop_flip"
        return Shard(self._data.train.images[rows], None, self._data.info, self._device, augment)

    @cached_property
    def _ood(self) -> Images:
        name = self._config.evaluation.ood
        if name is None:
            return np.empty((0, *self._data.info.shape), np.uint8)
        return load_ood(name, self._data.info, self._config.data.root)


def part_bounds(rows: int, part: int, parts: int) -> tuple[int, int]:
    """Rows [first, last) of part `part` of `parts`, cut at multiples of the batch."""
    batches = -(-rows // BATCH)
    first = batches * part // parts * BATCH
    last = batches * (part + 1) // parts * BATCH
    return min(first, rows), min(last, rows)
