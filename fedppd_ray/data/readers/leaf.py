"""FEMNIST as LEAF's preprocessing writes it: json files of writers, each with their images and labels.

Of LEAF's 62 classes the paper keeps the letters: labels 10 to 61 become 0 to 51 and digits are dropped. LEAF's pixels
are floats with ink 0 on paper 1; here they are uint8 with bright ink on dark paper, like MNIST and KMNIST, so that
nothing but the shape of the ink tells those sets apart.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.errors import DataError

_FOLDERS = ("femnist_leaf", "femnist", "femnist/data")
_FIRST_LETTER = 10
_SIDE = 28


def remedy(root: Path, part: PartName) -> str:
    return f"the .json files of LEAF's data/femnist/data/{part} into {root / 'femnist_leaf' / part}"


def files(root: Path, part: PartName) -> list[Path]:
    """Every json file of the part, in the first of the folders that has any."""
    for folder in _FOLDERS:
        found = sorted((root / folder / part).glob("*.json"))
        if found:
            return found
    return []


def read(root: Path, part: PartName) -> Split:
    pieces = [_read_file(path) for path in files(root, part)]
    names = sorted({writer for _, _, writers in pieces for writer in writers})
    numbers = {name: number for number, name in enumerate(names)}
    return Split(
        np.concatenate([images for images, _, _ in pieces]),
        np.concatenate([labels for _, labels, _ in pieces]),
        np.array([numbers[writer] for _, _, writers in pieces for writer in writers], np.int64),
    )


_Piece = tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]], list[str]]


def _read_file(path: Path) -> _Piece:
    """The letters of one file: images, labels, and the writer of each row by name."""
    images, labels, writers = [np.empty((0, 1, _SIDE, _SIDE), np.uint8)], [np.empty(0, np.int64)], []
    try:
        content = json.loads(path.read_bytes())
        for writer in content["users"]:
            rows = content["user_data"][writer]
            classes = np.array(rows["y"], np.int64)
            pixels = np.array(rows["x"], np.float32).reshape(len(classes), 1, _SIDE, _SIDE)
            if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
                raise ValueError("pixels are not between 0 and 1")
            letters = classes >= _FIRST_LETTER
            images.append(np.rint(255 * (1 - pixels[letters])).clip(0, 255).astype(np.uint8))
            labels.append(classes[letters] - _FIRST_LETTER)
            writers += [str(writer)] * int(letters.sum())
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not a json file of LEAF's FEMNIST ({reason}); make it again") from None
    return np.concatenate(images), np.concatenate(labels), writers
