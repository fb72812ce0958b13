"""Rows that are of no class, made of rows that are: what a score may be chosen on. No real foreign set is looked at."""

import numpy as np

from fedppd_ray.data.parts import Images
from fedppd_ray.data.shapes import resized

_BLOCKS = 4  # in each direction


def make_outliers(images: Images, generator: np.random.Generator) -> Images:
    """As many as there are images, in equal parts: noise, shuffled blocks, a small patch enlarged."""
    third = -(-len(images) // 3)
    parts = images[:third], images[third : 2 * third], images[2 * third :]
    makers = (_noise, _shuffled, _zoomed)
    return np.concatenate([make(part, generator) for make, part in zip(makers, parts, strict=True)])


def _noise(images: Images, generator: np.random.Generator) -> Images:
    """Gaussian, of the image's own mean and of a contrast of its own."""
    contrast = generator.uniform(20, 120, (len(images), 1, 1, 1))
    mean = images.mean(axis=(2, 3), keepdims=True)
    drawn: Images = np.clip(mean + contrast * generator.standard_normal(images.shape), 0, 255).astype(np.uint8)
    return drawn


def _shuffled(images: Images, generator: np.random.Generator) -> Images:
    """4 × 4 blocks in another order: the textures stay, the thing goes. What is left over at the edge stays too."""
    result = images.copy()
    height, width = (side // _BLOCKS for side in images.shape[2:])
    places = [(top * height, left * width) for top in range(_BLOCKS) for left in range(_BLOCKS)]
    for row, image in enumerate(images):
        for place, source in zip(places, generator.permutation(len(places)), strict=True):
            (top, left), (old_top, old_left) = place, places[source]
            block = image[:, old_top : old_top + height, old_left : old_left + width]
            result[row, :, top : top + height, left : left + width] = block
    return result


def _zoomed(images: Images, generator: np.random.Generator) -> Images:
    """A crop of a fifth to two fifths of each side, enlarged to the whole."""
    result = images.copy()
    height, width = images.shape[2:]
    for row, image in enumerate(images):
        share = generator.uniform(0.2, 0.4)
        tall, wide = max(2, round(share * height)), max(2, round(share * width))
        top, left = generator.integers(height - tall + 1), generator.integers(width - wide + 1)
        result[row] = resized(image[None, :, top : top + tall, left : left + wide], (height, width))[0]
    return result
