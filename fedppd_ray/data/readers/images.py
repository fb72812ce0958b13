"""A folder of image files: FOLDER/<class>/*.png|jpg|jpeg."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedppd_ray.data.parts import Images, Split
from fedppd_ray.errors import DataError

_SUFFIXES = (".png", ".jpg", ".jpeg")
_GREY_MODES, _COLOUR_MODES = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def class_names(folder: Path) -> list[str]:
    """The class folders, sorted."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def files(folder: Path) -> list[Path]:
    """Every image file, class by class, sorted by name."""
    return [
        path
        for name in class_names(folder)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]


def shape_of(path: Path) -> tuple[int, int, int]:
    """Channels (1 where the file is grey), height and width of one file."""
    with _opened(path) as image:
        return (1 if image.mode in _GREY_MODES else 3, image.height, image.width)


def read(folder: Path, classes: Sequence[str], shape: tuple[int, int, int]) -> Split:
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in class_names(folder) if name not in numbers]
    if unknown:
        raise DataError(f"{folder / unknown[0]}: a folder of no class; the classes are {', '.join(classes)}")
    paths = files(folder)
    images = np.empty((len(paths), *shape), np.uint8)
    for row, path in enumerate(paths):
        images[row] = _pixels(path, shape)
    return Split(images, np.array([numbers[path.parent.name] for path in paths], np.int64))


def _pixels(path: Path, shape: tuple[int, int, int]) -> Images:
    channels, height, width = shape
    with _opened(path) as image:
        if (image.height, image.width) != (height, width):
            raise DataError(
                f"{path}: {image.height}×{image.width} pixels where the others have {height}×{width}; "
                f"bring all images to one size"
            )
        if channels == 1 and image.mode not in _GREY_MODES:
            raise DataError(f"{path}: a colour image among grey ones; convert the one or the others")
        try:
            converted = np.asarray(image.convert("L" if channels == 1 else "RGB"), np.uint8)
        except OSError as error:
            raise DataError(f"{path}: cannot be read as an image ({error})") from None
    return converted.reshape(height, width, channels).transpose(2, 0, 1)


def _opened(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from None
    if image.mode not in (*_GREY_MODES, *_COLOUR_MODES):
        raise DataError(f"{path}: pixels of mode {image.mode} are not of 8 bits; save it as 8-bit grey or colour")
    return image
