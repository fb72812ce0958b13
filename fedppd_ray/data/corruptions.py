"""Test images made worse, in the manner of CIFAR-10-C (Hendrycks & Dietterich, ICLR 2019), at severities 1 to 5.

Made here from the run's own test rows, with constants of our own: figures are not comparable to CIFAR-10-C's.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.data.parts import Images
from fedppd_ray.data.shapes import resized
from fedppd_ray.seeding import numpy_generator_for

SEVERITIES = (1, 2, 3, 4, 5)
_Pixels = NDArray[np.float32]  # 0–255


def corrupted(images: Images, name: str, severity: int) -> Images:
    """The same rows always come out the same."""
    make, strengths = CORRUPTIONS[name]
    generator = numpy_generator_for(0, f"corruption/{name}/{severity}")
    pixels = make(np.asarray(images, np.float32), strengths[severity - 1], generator)
    return np.rint(np.clip(pixels, 0, 255)).astype(np.uint8)


def _noise(pixels: _Pixels, strength: float, generator: np.random.Generator) -> _Pixels:
    return pixels + 255 * strength * generator.standard_normal(pixels.shape, dtype=np.float32)


def _impulses(pixels: _Pixels, strength: float, generator: np.random.Generator) -> _Pixels:
    """A share of the pixels black or white."""
    drawn = generator.random((len(pixels), 1, *pixels.shape[2:]), dtype=np.float32)
    return np.where(drawn < strength / 2, 0, np.where(drawn < strength, 255, pixels)).astype(np.float32)


def _blur(pixels: _Pixels, strength: float, _generator: np.random.Generator) -> _Pixels:
    """Gaussian, edges repeated."""
    reach = int(np.ceil(3 * strength))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / strength) ** 2)
    for axis in (2, 3):
        widths = [(0, 0)] * 4
        widths[axis] = (reach, reach)
        padded, side = np.pad(pixels, widths, mode="edge"), pixels.shape[axis]
        lines = [padded.take(range(at, at + side), axis) for at in range(2 * reach + 1)]
        pixels = sum((np.float32(w) * line for w, line in zip(weights / weights.sum(), lines, strict=True)), 0 * pixels)
    return pixels


def _contrast(pixels: _Pixels, strength: float, _generator: np.random.Generator) -> _Pixels:
    mean = pixels.mean(axis=(2, 3), keepdims=True)
    nearer: _Pixels = mean + np.float32(1 - strength) * (pixels - mean)
    return nearer


def _brightness(pixels: _Pixels, strength: float, _generator: np.random.Generator) -> _Pixels:
    return pixels + np.float32(255 * strength)


def _pixelate(pixels: _Pixels, strength: float, _generator: np.random.Generator) -> _Pixels:
    """Shrunk by a share of each side, and back without smoothing."""
    height, width = pixels.shape[2:]
    small = (max(1, round((1 - strength) * height)), max(1, round((1 - strength) * width)))
    shrunk = resized(pixels.astype(np.uint8), small)
    rows, columns = (
        (2 * np.arange(side) + 1) * few // (2 * side) for side, few in zip((height, width), small, strict=True)
    )
    return shrunk[:, :, rows][:, :, :, columns].astype(np.float32)


_Maker = Callable[[_Pixels, float, np.random.Generator], _Pixels]
CORRUPTIONS: Mapping[str, tuple[_Maker, tuple[float, ...]]] = {
    "gaussian_noise": (_noise, (0.04, 0.06, 0.08, 0.10, 0.14)),
    "impulse_noise": (_impulses, (0.01, 0.03, 0.05, 0.08, 0.12)),
    "blur": (_blur, (0.4, 0.6, 0.8, 1.0, 1.4)),
    "contrast": (_contrast, (0.25, 0.4, 0.55, 0.7, 0.85)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelate": (_pixelate, (0.1, 0.3, 0.4, 0.5, 0.6)),
}
