"""A network from outside: one hidden layer on the flattened input, any shape."""

from torch import Tensor, nn

import fedppd_ray as fp


@fp.register_network("flat_net")
class FlatNet(nn.Module):
    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * height * width, 32), nn.ReLU(), nn.Linear(32, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out
