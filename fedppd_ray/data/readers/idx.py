"""MNIST's format and that of its relatives: idx files, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.errors import DataError

_FILES: dict[PartName, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def remedy(folder: str, root: Path, part: PartName) -> str:
    return f"{' and '.join(_FILES[part])} (plain or .gz) into {root / folder / 'raw'}"


def files(folder: str, root: Path, part: PartName) -> list[Path]:
    """ROOT/<folder>/raw/…: images and labels of this part; none while one is missing."""
    found = [_plain_or_gz(root / folder / "raw" / name) for name in _FILES[part]]
    return [path for path in found if path is not None] if all(found) else []


def read(folder: str, root: Path, part: PartName) -> Split:
    images, labels = (_array(path) for path in files(folder, root, part))
    return Split(np.expand_dims(images, 1), labels.astype(np.int64))


def _plain_or_gz(path: Path) -> Path | None:
    zipped = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, zipped) if candidate.exists()), None)


def _array(path: Path) -> NDArray[np.uint8]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    # Two zero bytes, a type code (8: unsigned byte), the number of dimensions, then each as big-endian int32.
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] == 0:
        raise DataError(f"{path} is not an idx file of unsigned bytes; fetch it again")
    dimensions = content[3]
    if len(content) < 4 + 4 * dimensions:
        raise DataError(f"{path} is cut short in its header; fetch it again")
    shape = np.frombuffer(content, ">i4", count=dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if values.size != int(np.prod(shape)):
        raise DataError(f"{path} is cut short: {values.size} values for shape {shape.tolist()}; fetch it again")
    return values.reshape(shape)
