"""Mixup (Zhang et al., ICLR 2018): convex combinations of two rows of a batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """a · row i + (1 − a) · row order[i]."""

    share: float
    order: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Inputs, or targets with one line a row."""
        return torch.lerp(values[self.order], values, self.share)


def draw_mix(rows: int, alpha: float, generator: np.random.Generator, device: torch.device) -> Mix:
    """a ~ Beta(α, α), one for the batch, and whom each row is mixed with."""
    share = float(generator.beta(alpha, alpha))
    return Mix(share, torch.from_numpy(generator.permutation(rows)).to(device))
