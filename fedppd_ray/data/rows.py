"""A client's rows as tensors, and the minibatches of an epoch.

Rows stay uint8; a batch is gathered, augmented and normalised by tensor operations only. They lie in memory with
the channels last: convolution and pooling on a CPU are a fifth to a third faster that way, and a batch comes out of
the gather in that order anyway.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.data.mapped import stays_mapped

_PAD = 4  # pixels around an image before a random crop


def normalisation(
    mean: Sequence[float], std: Sequence[float], span: tuple[float, float] = (0.0, 255.0)
) -> tuple[Tensor, Tensor]:
    """(pixel / 255 − mean) / std as one factor and one shift: (scale, shift). `span`: another range than 0–255."""
    deviation = torch.tensor(std).view(1, -1, 1, 1)
    if span != (0.0, 255.0):
        low, width = span[0], span[1] - span[0]
        return 1 / (width * deviation), -(torch.tensor(mean).view(1, -1, 1, 1) + low / width) / deviation
    return 1 / (255 * deviation), -torch.tensor(mean).view(1, -1, 1, 1) / deviation


def network_inputs(values: NDArray[np.uint8] | NDArray[np.float32], scale: Tensor, shift: Tensor) -> Tensor:
    """Rows × channels × height × width values as they came in, normalised as in training.

    A copy, because the rows may be a read-only view of a request's body, which torch cannot wrap; channels last,
    however they came, as a shard has them: another layout may change the last bit of a prediction.
    """
    rows = torch.from_numpy(np.array(values.transpose(0, 2, 3, 1), order="C")).permute(0, 3, 1, 2)
    return torch.addcmul(shift, rows.float(), scale)


class Shard(Protocol):
    """Rows of a data set, resident on a device, whatever they are made of. Labels may be absent (the server's pool)."""

    device: torch.device
    labels: Tensor | None

    def __len__(self) -> int: ...
    def inputs(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What a network is shown of these rows; augmented if the shard augments and a generator is given."""

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order: (inputs, row numbers), in batches of at most `size`."""


class ImageShard:
    """Images: of 8 bits per channel as they are, of 16 bits or floats as float32."""

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[np.int64] | None,
        info: DatasetInfo,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> None:
        self.device = torch.device(device)
        # rows × height × width × channels
        kind = np.uint8 if images.dtype == np.uint8 else np.float32
        self._images = torch.from_numpy(np.array(images.transpose(0, 2, 3, 1), kind, order="C")).to(self.device)
        self.labels = None if labels is None else torch.from_numpy(np.array(labels)).to(self.device)
        self.augment = augment
        self._rows, self._height, self._width = len(images), *images.shape[2:]
        scale, shift = normalisation(info.mean, info.std, info.range)
        # One factor for each number of an image's line: long inner loops, where three channels alone make short ones.
        self._scale = scale.flatten().repeat(self._width).to(self.device)
        self._shift = shift.flatten().repeat(self._width).to(self.device)
        if augment:
            padded = torch.nn.functional.pad(self._images, (0, 0, _PAD, _PAD, _PAD, _PAD))
            # rows × top × left × height × width × channels: every crop, as a view
            crops = padded.unfold(1, self._height, 1).unfold(2, self._width, 1)
            self._crops = crops.permute(0, 1, 2, 4, 5, 3)

    def __len__(self) -> int:
        return self._rows

    def inputs(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Normalised images of these rows, N × C × H × W; augmented if the shard augments and a generator is given."""
        augment = self.augment and generator is not None
        pixels = self._crop_and_flip(rows, generator) if augment else self._images.index_select(0, rows)
        normalised = torch.addcmul(self._shift, pixels.flatten(2).float(), self._scale)
        return normalised.view(pixels.shape).permute(0, 3, 1, 2)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order: (normalised inputs, row numbers)."""
        return _epoch(self, size, generator)

    def _crop_and_flip(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Zero-pad by 4, crop at random, mirror half of the images: two gathers of whole lines."""
        count = len(rows)
        top, left = torch.randint(2 * _PAD + 1, (2, count), generator=generator, device=self.device)
        mirror = torch.rand(count, generator=generator, device=self.device) < 0.5
        cropped = self._crops[rows, top, left]
        both = torch.cat((cropped, cropped.flip(2)))
        return both.index_select(0, torch.arange(count, device=self.device) + count * mirror)


class MappedShard:
    """Images that are too many to copy: every batch is read from the file. The bits of an `ImageShard`, slower."""

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[np.int64] | None,
        info: DatasetInfo,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._images, self._info, self._augment = images, info, augment
        self.labels = None if labels is None else torch.from_numpy(np.array(labels)).to(self.device)

    def __len__(self) -> int:
        return len(self._images)

    def inputs(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As an `ImageShard` of these rows alone would show them."""
        batch = ImageShard(self._images[rows.cpu().numpy()], None, self._info, self.device, self._augment)
        return batch.inputs(torch.arange(len(rows), device=self.device), generator)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order: (normalised inputs, row numbers)."""
        return _epoch(self, size, generator)


class TableShard:
    """Rows of a table, encoded as numbers already."""

    def __init__(
        self, rows: NDArray[np.float32], labels: NDArray[np.int64] | None, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self._values = torch.from_numpy(np.array(rows, np.float32)).to(self.device)
        self.labels = None if labels is None else torch.from_numpy(np.array(labels)).to(self.device)

    def __len__(self) -> int:
        return len(self._values)

    def inputs(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As they are: nothing of a table is augmented."""
        return self._values.index_select(0, rows)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in random order: (inputs, row numbers)."""
        return _epoch(self, size, generator)


def _epoch(shard: Shard, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """All rows once, in random order.

    Batches are of equal size, give or take a row, and at most `size`. The usual short last batch (321 rows make eight
    of 40 and one of 1) gives a gradient so noisy that it can throw a network with dropout off.
    """
    order = torch.randperm(len(shard), generator=generator, device=shard.device)
    for rows in order.tensor_split(-(-len(shard) // size)):
        yield shard.inputs(rows, generator), rows


def make_shard(
    values: NDArray[Any],
    labels: NDArray[np.int64] | None,
    info: DatasetInfo,
    device: torch.device | str = "cpu",
    augment: bool = False,
) -> Shard:
    """The rows of a data set, whatever they are made of."""
    if info.table is not None:
        return TableShard(values, labels, device)
    if stays_mapped(values):
        return MappedShard(values, labels, info, device, augment)
    return ImageShard(values, labels, info, device, augment)
