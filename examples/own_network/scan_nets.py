"""A network of one's own: any nn.Module that is built as Class(shape, classes, **network_args)."""

import torch
from torch import Tensor, nn


class ScanNet(nn.Module):
    """Two convolutions, group normalisation, attention over the image's lines."""

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Dropout(0.1),  # replaced by a seeded one: bits hold
        )
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        places = self.features(x).flatten(2).transpose(1, 2)
        seen, _ = self.attention(self.query.expand(len(x), -1, -1), places, places, need_weights=False)
        scores: Tensor = self.out(seen[:, 0])
        return scores
