"""The rows that no client trains on, and predictions for them."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import Dataset, Labels, Values, load_ood
from fedppd_ray.data.holdings import dataset_of, needs_train, partition_of
from fedppd_ray.data.outliers import make_outliers
from fedppd_ray.data.partition import Indices
from fedppd_ray.data.rows import Shard, make_shard
from fedppd_ray.data.shapes import as_bytes, in_range
from fedppd_ray.inference.predictor import BATCH, Predictor, outputs_of
from fedppd_ray.inference.scores import Outputs
from fedppd_ray.seeding import numpy_generator_for


class HeldOut:
    """The public held-out data of a run: test set, calibration set, unlabelled pool, out-of-distribution sets."""

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self._data = dataset_of(config)
        self._pool_rows, self._calibration_rows = _kept_rows(config, self._data)
        self._loaded: dict[str, Values] = {}

    def images(self, split: str) -> Values:
        if split == "test":
            return self._data.test.images
        if split == "calibration":
            return self._train_images(self._calibration_rows)
        if split == "outliers":
            return self._outliers
        if split == "ood":  # all of them
            return np.concatenate([self._empty(), *(self.images(f"ood/{name}") for name in self.ood_names)])
        if split.startswith("ood/"):
            return self._ood(split.removeprefix("ood/"))
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
        pieces = [predict(inputs).cpu().numpy() for inputs in self._batches(images, first, last)]
        return np.concatenate(pieces) if pieces else np.empty((0, len(self._data.info.classes)))

    def outputs(self, predict: Predictor, split: str | Values) -> Outputs:
        """All that a predictor has to say of a split's rows, or of these images."""
        images = self.images(split) if isinstance(split, str) else split
        return outputs_on(predict, images, self._data.info, self._device)

    def _batches(self, images: Values, first: int, last: int) -> Iterator[torch.Tensor]:
        return _batches(images, first, last, self._data.info, self._device)

    def server_pool(self) -> Shard:
        return self._pool

    @cached_property
    def _pool(self) -> Shard:
        # Never augmented: pseudo-labels are those of the images as they are, and what is shown is what was labelled.
        return make_shard(self._train_images(self._pool_rows), None, self._data.info, self._device)

    def _train_images(self, rows: Indices) -> Values:
        # Where clients have folders there may be no common training part at all.
        return self._data.train.images[rows] if len(rows) else self._empty()

    def _empty(self) -> Values:
        return np.empty((0, *self._data.info.shape), np.uint8)

    @property
    def ood_names(self) -> tuple[str, ...]:
        return self._config.evaluation.ood_names

    def _ood(self, name: str) -> Values:
        if name not in self._loaded:
            self._loaded[name] = load_ood(name, self._data.info, self._config.data.root)
        return self._loaded[name]

    @cached_property
    def _outliers(self) -> Values:
        """Made of calibration rows: what a score may be chosen on, other than the out-of-distribution sets."""
        span = self._data.info.range
        images = as_bytes(self.images("calibration"), span)
        return in_range(make_outliers(images, numpy_generator_for(self._config.seed, "outliers")), span)


def outputs_on(predict: Predictor, images: Values, info: DatasetInfo, device: torch.device) -> Outputs:
    """All that a predictor has to say of these images, or rows of a table."""
    pieces = [outputs_of(predict, inputs) for inputs in _batches(images, 0, len(images), info, device)]
    return joined_outputs(pieces) if pieces else Outputs(np.empty((0, len(info.classes))))


def joined_outputs(pieces: Sequence[Outputs]) -> Outputs:
    """One after the other."""
    return Outputs(
        np.concatenate([piece.log_probabilities for piece in pieces]),
        _joined([piece.logits for piece in pieces]),
        _joined([piece.features for piece in pieces]),
    )


def _batches(images: Values, first: int, last: int, info: DatasetInfo, device: torch.device) -> Iterator[torch.Tensor]:
    for start in range(first, last, BATCH):
        shard = make_shard(images[start : min(start + BATCH, last)], None, info, device)
        yield shard.inputs(torch.arange(len(shard), device=device))


def _joined(pieces: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    known = [piece for piece in pieces if piece is not None]
    return np.concatenate(known) if len(known) == len(pieces) else None


def _kept_rows(config: Config, data: Dataset) -> tuple[Indices, Indices]:
    """Indices of the training part that no client gets: the server's pool and the calibration set."""
    if not needs_train(config):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    split = partition_of(config, data.train)
    return split.server_pool, split.calibration


def part_bounds(rows: int, part: int, parts: int) -> tuple[int, int]:
    """Indices [first, last) of part `part` of `parts`, cut at multiples of the batch."""
    batches = -(-rows // BATCH)
    first = batches * part // parts * BATCH
    last = batches * (part + 1) // parts * BATCH
    return min(first, rows), min(last, rows)
