"""A client's rows as tensors, and the minibatches of an epoch.

Rows stay uint8; a batch is gathered, augmented and normalised by tensor operations only. They lie in memory with
the channels last: convolution and pooling on a CPU are a fifth to a third faster that way, and a batch comes out of
the gather in that order anyway.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppd_ray.data.catalog import DatasetInfo

_PAD = 4  # pixels around an image before a random crop


def normalisation(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(pixel / 255 − mean) / std as one factor and one shift: (scale, shift)."""
    deviation = torch.tensor(std).view(1, -1, 1, 1)
    return 1 / (255 * deviation), -torch.tensor(mean).view(1, -1, 1, 1) / deviation


class Shard:
    """Rows of a data set, resident on a device. Labels may be absent (the server's pool)."""

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64] | None,
        info: DatasetInfo,
        device: torch.device | str = "cpu",
        augment: bool = False,
    ) -> None:
        self.device = torch.device(device)
        # rows × height × width × channels
        self._images = torch.from_numpy(np.array(images.transpose(0, 2, 3, 1), order="C")).to(self.device)
        self.labels = None if labels is None else torch.from_numpy(np.array(labels)).to(self.device)
        self.augment = augment
        self._rows, self._height, self._width = len(images), *images.shape[2:]
        scale, shift = normalisation(info.mean, info.std)
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
        """One epoch in random order: (normalised inputs, row numbers).

        Batches are of equal size, give or take a row, and at most `size`. The usual short last batch (321 rows
        make eight of 40 and one of 1) gives a gradient so noisy that it can throw a network with dropout off.
        """
        order = torch.randperm(self._rows, generator=generator, device=self.device)
        for rows in order.tensor_split(-(-self._rows // size)):
            yield self.inputs(rows, generator), rows

    def _crop_and_flip(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Zero-pad by 4, crop at random, mirror half of the images: two gathers of whole lines."""
        count = len(rows)
        top, left = torch.randint(2 * _PAD + 1, (2, count), generator=generator, device=self.device)
        mirror = torch.rand(count, generator=generator, device=self.device) < 0.5
        cropped = self._crops[rows, top, left]
        both = torch.cat((cropped, cropped.flip(2)))
        return both.index_select(0, torch.arange(count, device=self.device) + count * mirror)
