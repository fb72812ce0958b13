"""The embedded out-of-distribution set: letters, drawn from the fonts that matplotlib ships.

No download, no randomness from outside: row i is always the same picture. Letters that a digit classifier may
rightly take for a digit (O and 0, l and 1, S and 5, …) are left out.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedppd_ray.config.nouns import Shape
from fedppd_ray.seeding import numpy_generator_for

_LETTERS = "ACDEFGHJKLMNPQRTUVWXYadefhkmnprtuvwxy"
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
    "cmr10",
    "cmss10",
)
_SUPERSAMPLE = 4


def draw_glyphs(rows: int, shape: Shape) -> NDArray[np.uint8]:
    """`rows` letters as uint8 images of `shape`: white on black, or two colours where there are three channels."""
    fonts = [_font(name, int(shape[1] * _SUPERSAMPLE * 0.72)) for name in _FONTS]
    generator = numpy_generator_for(0, f"glyphs/{shape}")
    images = np.empty((rows, *shape), np.uint8)
    for row in range(rows):
        letter = _LETTERS[generator.integers(len(_LETTERS))]
        ink = _draw(letter, fonts[generator.integers(len(fonts))], generator, (shape[1], shape[2]))
        colours = np.array([[255.0], [0.0]]) if shape[0] == 1 else generator.uniform(0, 255, (2, shape[0]))
        front, back = colours[:, :, None, None] if shape[0] > 1 else colours[:, :1, None, None]
        images[row] = np.rint(ink * front + (1 - ink) * back)
    return images


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def _draw(
    letter: str, font: ImageFont.FreeTypeFont, generator: np.random.Generator, size: tuple[int, int]
) -> NDArray[np.float64]:
    """Coverage by ink in [0, 1], slightly turned and shifted."""
    height, width = (side * _SUPERSAMPLE for side in size)
    canvas = Image.new("L", (width, height))
    shift = generator.uniform(-1.5, 1.5, 2) * _SUPERSAMPLE
    place = (width / 2 + shift[0], height / 2 + shift[1])
    ImageDraw.Draw(canvas).text(place, letter, fill=255, font=font, anchor="mm")
    turned = canvas.rotate(float(generator.uniform(-15, 15)), Image.Resampling.BILINEAR)
    small = turned.resize(size[::-1], Image.Resampling.BOX)
    return np.asarray(small, np.float64) / 255
