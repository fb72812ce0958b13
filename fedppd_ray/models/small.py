"""Small networks for rows of any shape: a convolutional one for images, a perceptron for tables and features.

`network: auto` takes them where the paper has no network; the student is the larger one, as in the paper.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedppd_ray.models.layers import Dropout, pool_and_relu

_LAST_SIDE = 7  # blocks halve the image until its shorter side is about this
_MOST_BLOCKS = 5
_POOLED = 4  # maps of any size become 4×4 before the linear layers
_GROUPS = 4


class SmallCNN(nn.Module):
    """`depth` blocks of a 3×3 convolution and pooling, adaptive pooling, one hidden layer.

    `width`: maps of the first block, doubled in each of the next two; `depth`: blocks, chosen by the image's size;
    `norm`: "group" normalises within a row, so that no statistics have to be averaged over clients; `dropout`: before
    the last layer.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        width: int = 32,
        depth: int | None = None,
        norm: Literal["none", "group"] = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, *sides = shape
        if len(sides) != 2:
            raise ValueError("takes images: channels, height and width")
        if norm not in ("none", "group"):
            raise ValueError(f"norm {norm!r} is neither 'none' nor 'group'")
        _require(width >= 1 and width % _GROUPS == 0, f"width {width} is not a multiple of {_GROUPS}")
        blocks = _depth_for(min(sides)) if depth is None else depth
        _require(1 <= blocks <= _MOST_BLOCKS, f"depth {blocks} is not between 1 and {_MOST_BLOCKS}")
        maps = [channels, *(width * 2 ** min(block, 2) for block in range(blocks))]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(maps))
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, b) if norm == "group" else nn.Identity() for b in maps[1:])
        self.hidden = nn.Linear(maps[-1] * _POOLED**2, 4 * width)
        self.drop = _dropout(dropout)
        self.out = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x))
            x = pool_and_relu(x) if min(x.shape[2:]) > 1 else F.relu(x)
        x = F.adaptive_avg_pool2d(x, _POOLED).flatten(1)
        out: Tensor = self.out(self.drop(F.relu(self.hidden(x))))
        return out


class MLP(nn.Module):
    """Linear layers of these widths with ReLU between them; whatever the row's shape, it is flattened."""

    def __init__(
        self, shape: Sequence[int], classes: int, hidden: Sequence[int] = (64, 64), dropout: float = 0.0
    ) -> None:
        super().__init__()
        wide = all(isinstance(width, int) and width >= 1 for width in hidden)
        _require(not isinstance(hidden, str) and wide, f"hidden {hidden!r} is not a list of widths")
        widths = (math.prod(shape), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.drop = _dropout(dropout)
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        out: Tensor = self.out(self.drop(x))
        return out


def _depth_for(side: int) -> int:
    return min(_MOST_BLOCKS, max(1, math.ceil(math.log2(side / _LAST_SIDE)))) if side > _LAST_SIDE else 1


def _dropout(p: float) -> nn.Module:
    _require(0 <= p < 1, f"dropout {p} is not a share below 1")
    return Dropout(p) if p else nn.Identity()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
