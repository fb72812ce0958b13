"""Predictive distributions on data that no client trains on."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppd_ray.config import Config
from fedppd_ray.data.batches import Shard
from fedppd_ray.data.datasets import Dataset, Images, Labels, load_ood
from fedppd_ray.data.holdings import dataset_of, needs_train, partition_of
from fedppd_ray.data.partition import Rows
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
        self._data = dataset_of(config)
        self._pool_rows, self._calibration_rows = _kept_rows(config, self._data)

    def images(self, split: str) -> Images:
        if split == "test":
            return self._data.test.images
        if split == "calibration":
            return self._train_images(self._calibration_rows)
        if split == "ood":
            return self._ood
        raise ValueError(f"no split {split!r}")

    def labels(self, split: str) -> Labels:
        if split == "test":
            return np.asarray(self._data.test.labels)
        if split == "calibration":
            rows = self._calibration_rows
            return np.asarray(self._data.train.labels[rows] if len(rows) else rows)
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
        augment = self._config.client.augment == "crop_flip"
        return Shard(self._train_images(self._pool_rows), None, self._data.info, self._device, augment)

    def _train_images(self, rows: Rows) -> Images:
        # Where clients have folders there may be no common training part at all.
        return self._data.train.images[rows] if len(rows) else np.empty((0, *self._data.info.shape), np.uint8)

    @cached_property
    def _ood(self) -> Images:
        name = self._config.evaluation.ood
        if name is None:
            return np.empty((0, *self._data.info.shape), np.uint8)
        return load_ood(name, self._data.info, self._config.data.root)


def _kept_rows(config: Config, data: Dataset) -> tuple[Rows, Rows]:
    """Rows of the training part that no client gets: the server's pool and the calibration set."""
    if not needs_train(config):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    split = partition_of(config, data.train)
    return split.server_pool, split.calibration


def part_bounds(rows: int, part: int, parts: int) -> tuple[int, int]:
    """Rows [first, last) of part `part` of `parts`, cut at multiples of the batch."""
    batches = -(-rows // BATCH)
    first = batches * part // parts * BATCH
    last = batches * (part + 1) // parts * BATCH
    return min(first, rows), min(last, rows)
