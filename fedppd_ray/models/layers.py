"""Layers that several networks share: dropout from a given generator, pooling before ReLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """Dropout that draws from a given generator, so that no bit depends on global random state.

    `channels=True` drops whole feature maps (dropout2d).
    """

    def __init__(self, p: float = 0.5, channels: bool = False) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.generator is None:
            raise RuntimeError("dropout in training mode needs a generator: call seed_dropout(module, generator)")
        shape = (*x.shape[:2], *([1] * (x.dim() - 2))) if self.channels else x.shape
        keep = torch.empty(shape, device=x.device, dtype=x.dtype)
        keep.bernoulli_(1 - self.p, generator=self.generator)
        return x * keep.div_(1 - self.p)


def seed_dropout(module: nn.Module, generator: torch.Generator) -> None:
    for part in module.modules():
        if isinstance(part, Dropout):
            part.generator = generator


def pool_and_relu(x: Tensor) -> Tensor:
    """ReLU of the maximum of each 2×2 block; a last odd line or column is dropped.

    Without gradients two strided maxima do: they need not note where each maximum came from, and a forward pass takes
    a sixth to a third less. Their backward pass is slower than max_pool2d's and would share a tie's gradient.
    """
    if torch.is_grad_enabled():
        return F.relu(F.max_pool2d(x, 2))
    height, width = (side // 2 * 2 for side in x.shape[2:])
    lines = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(lines[..., 0:width:2], lines[..., 1:width:2]).relu_()
