"""SVHN's cropped digits: the published .mat files (by torchvision and scipy), or plain numpy arrays."""

from pathlib import Path

import numpy as np

from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.errors import DataError
from fedppd_ray.models.torchvision_import import import_torchvision


def remedy(root: Path, part: PartName) -> str:
    where = root / "SVHN"
    return (
        f"{part}_32x32.mat into {where}, or {part}_images.npy (uint8, N×32×32×3) and {part}_labels.npy (0 to 9) into it"
    )


def files(root: Path, part: PartName) -> list[Path]:
    """The two arrays, or the one .mat file (in ROOT/SVHN or, as torchvision puts it, in ROOT)."""
    arrays = [root / "SVHN" / f"{part}_{what}.npy" for what in ("images", "labels")]
    if all(path.exists() for path in arrays):
        return arrays
    published = (root / "SVHN" / f"{part}_32x32.mat", root / f"{part}_32x32.mat")
    return [path for path in published if path.exists()][:1]


def read(root: Path, part: PartName) -> Split:
    found = files(root, part)
    if found[0].suffix == ".mat":
        return _read_mat(found[0], part)
    try:
        images, labels = (np.load(path, mmap_mode="r") for path in found)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{found[0].parent}: {part}_images.npy or {part}_labels.npy cannot be read ({error})") from None
    if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{found[0]}: {images.dtype} {images.shape} with labels {labels.dtype} {labels.shape}, "
            f"expected uint8 N×32×32×3 and N integers"
        )
    return Split(images.transpose(0, 3, 1, 2), labels.astype(np.int64))


def _read_mat(path: Path, part: PartName) -> Split:
    """torchvision reads it and makes the published label 10 a 0."""
    try:
        data = import_torchvision().datasets.SVHN(str(path.parent), split=part)
    except ImportError:
        raise DataError(f"{path}: .mat files are read by scipy; install it (pip install scipy)") from None
    except RuntimeError as error:  # torchvision's word for "missing or damaged"
        raise DataError(f"{path} is damaged ({' '.join(str(error).split())}); fetch it again") from None
    return Split(np.asarray(data.data, np.uint8), np.asarray(data.labels, np.int64))
