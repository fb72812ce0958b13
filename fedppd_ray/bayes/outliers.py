"""Images of nothing, made of a batch's own: what a network is to be unsure about (outlier exposure without outliers).

Hendrycks et al. (ICLR 2019) train for a uniform prediction on real outliers, which clients do not have. These are made
of their own images, normalised as the network sees them, in equal parts:

    zoom    a crop of 3/16 to 3/8 of the side (6 to 12 of 32), enlarged to the whole by bilinear interpolation
    blocks  the image cut into 4 × 4 blocks, in random order
    noise   N(0, σ²), σ uniform between .2 and 1.7
    phase   the image's own amplitude spectrum with random phases, its mean kept
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CROP = (3 / 16, 3 / 8)  # share of the side
_GRID = 4
_SIGMA = (0.2, 1.7)


def zoomed(images: Tensor, generator: torch.Generator) -> Tensor:
    height, width = images.shape[2:]
    side = min(height, width)
    low, high = (max(2, round(share * side)) for share in _CROP)
    made = []
    for image in images:
        size = _integer(low, high + 1, generator)
        top, left = _integer(0, height - size + 1, generator), _integer(0, width - size + 1, generator)
        crop = image[None, :, top : top + size, left : left + size]
        made.append(F.interpolate(crop, (height, width), mode="bilinear", align_corners=False))
    return torch.cat(made)


def shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    """Lines and columns that no whole block covers stay where they are."""
    high, wide = (side // _GRID for side in images.shape[2:])
    made = images.clone()
    for image in made:
        blocks = image[:, : _GRID * high, : _GRID * wide].unfold(1, high, high).unfold(2, wide, wide)
        order = torch.randperm(_GRID * _GRID, generator=generator, device=images.device)
        # channels × line of blocks × column of blocks × height × width
        moved = blocks.flatten(1, 2)[:, order].unflatten(1, (_GRID, _GRID))
        image[:, : _GRID * high, : _GRID * wide] = moved.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return made


def noise(images: Tensor, generator: torch.Generator) -> Tensor:
    low, high = _SIGMA
    drawn = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)
    values = torch.randn(images.shape, generator=generator, device=images.device)
    return (low + (high - low) * drawn) * values


def random_phase(images: Tensor, generator: torch.Generator) -> Tensor:
    """The phases of white noise are added, the same to every channel: colours keep their relation to each other."""
    drawn = torch.randn((len(images), 1, *images.shape[2:]), generator=generator, device=images.device)
    spectrum = torch.fft.rfft2(drawn)
    turn = spectrum / spectrum.abs().clamp_min(torch.finfo(drawn.dtype).tiny)
    turn[..., 0, 0] = 1  # the image's mean
    made: Tensor = torch.fft.irfft2(torch.fft.rfft2(images) * turn, s=images.shape[2:])
    return made


KINDS = (zoomed, shuffled, noise, random_phase)


def synthetic_outliers(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` images made of the first of a batch, a quarter of each kind; who gets one more is drawn."""
    first = _integer(0, len(KINDS), generator)
    parts = []
    for index, kind in enumerate(KINDS):
        own = images[: min(count, len(images))][(first + index) % len(KINDS) :: len(KINDS)]
        if len(own):
            parts.append(kind(own, generator))
    return torch.cat(parts).contiguous(memory_format=torch.channels_last)


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    """− 1/M Σ_x Σ_c 1/C log softmax(logits)_c."""
    return -torch.log_softmax(logits, dim=1).mean()


@dataclass(frozen=True)
class OutlierTerm:
    """λ_o · CE(uniform, softmax f(x̃)) of one client's round; its generator is nobody else's."""

    weight: float
    share: float  # outliers per row of a batch
    generator: torch.Generator

    def made_of(self, images: Tensor) -> Tensor:
        return synthetic_outliers(images, max(1, round(self.share * len(images))), self.generator)


def logits_and_penalty(network: nn.Module, inputs: Tensor, term: OutlierTerm | None) -> tuple[Tensor, Tensor | None]:
    """The network on its inputs, and the term of outliers made of them, in one forward pass."""
    if term is None:
        return network(inputs), None
    both: Tensor = network(torch.cat((inputs, term.made_of(inputs))))
    return both[: len(inputs)], term.weight * uniform_cross_entropy(both[len(inputs) :])


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    """Uniform in low … high − 1."""
    return int(torch.randint(low, high, (), generator=generator, device=generator.device))
