"""Named data sets as uint8 arrays, parsed once a machine and memory-mapped by every process that needs them.

`load` returns read-only maps of the cache's `.npy` files: ten actors on a node share one copy in the page
cache. `prepare` fills that cache, once, under a file lock.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.data import sources
from fedppd_ray.data.catalog import CATALOG, DatasetInfo
from fedppd_ray.data.glyphs import draw_glyphs
from fedppd_ray.errors import DataError

Images = NDArray[np.uint8]  # rows × channels × height × width
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    info: DatasetInfo
    train: Split
    test: Split


_READERS: dict[str, Callable[[Path], sources.Parts]] = {
    "mnist5k": sources.read_mnist5k,
    "mnist": lambda root: sources.read_idx("MNIST", "MNIST", root),
    "fashion_mnist": lambda root: sources.read_idx("FashionMNIST", "FashionMNIST", root),
    "cifar10": sources.read_cifar10,
}
_EMBEDDED = ("mnist5k",)
_PARTS = ("train_images", "train_labels", "test_images", "test_labels")
# Part of every cache key: raise it when the meaning of cached files changes.
_CACHE_VERSION = 1


def data_root(root: str | None) -> Path:
    """Where a user's data files are: the setting, $FEDPPD_DATA, or a folder of our own."""
    chosen = root or os.environ.get("FEDPPD_DATA")
    return Path(chosen).expanduser().resolve() if chosen else cache_root() / "downloads"


def cache_root() -> Path:
    # An empty XDG_CACHE_HOME counts as unset: otherwise the cache would lie in the root folder.
    base = os.environ.get("FEDPPD_CACHE") or (os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/fedppd"
    return Path(base).expanduser().resolve()


def prepare(name: str, root: str | None = None) -> Path:
    """Make sure the parsed arrays of a data set lie in the cache; return their folder."""
    if name not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise DataError(f"data set {name!r} has no files to prepare; choose one of {known}")
    folder = _cache_folder(name, data_root(root))
    if not folder.exists():
        _make_private(folder.parent)
        with _locked(folder.with_suffix(".lock")):
            if not folder.exists():
                parts = _READERS[name](data_root(root))
                _require_fit(CATALOG[name], parts, data_root(root))
                _fill(folder, parts)
    return folder


def load(name: str, root: str | None = None) -> Dataset:
    """The data set as memory-mapped arrays."""
    folder = prepare(name, root)
    arrays = [np.load(folder / f"{part}.npy", mmap_mode="r") for part in _PARTS]
    return Dataset(CATALOG[name], Split(arrays[0], arrays[1]), Split(arrays[2], arrays[3]))


def load_ood(name: str, against: DatasetInfo, root: str | None = None, rows: int = 2000) -> Images:
    """Images that do not belong to `against`, in its shape."""
    if CATALOG[name].adapts:
        return draw_glyphs(rows, against.shape)
    return load(name, root).test.images


def _cache_folder(name: str, root: Path) -> Path:
    source = "embedded" if name in _EMBEDDED else hashlib.sha256(str(root).encode()).hexdigest()[:12]
    return cache_root() / "arrays" / f"{name}-{source}-v{_CACHE_VERSION}"


def _require_fit(info: DatasetInfo, parts: sources.Parts, root: Path) -> None:
    """Refuse files that are sound but of another data set, before they get into the cache."""
    for split, images, labels in (("training", parts[0], parts[1]), ("test", parts[2], parts[3])):
        if labels.ndim != 1 or images.shape != (len(labels), *info.shape):
            raise DataError(
                f"{info.name} under {root}: {split} images of shape {images.shape} and labels of shape {labels.shape} "
                f"are not rows of {info.shape} with a label each; fetch the files again"
            )
        if len(labels) == 0 or labels.min() < 0 or labels.max() >= len(info.classes):
            raise DataError(
                f"{info.name} under {root}: {split} labels are not 0 to {len(info.classes) - 1}; fetch the files again"
            )


def _fill(folder: Path, parts: sources.Parts) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for part, array in zip(_PARTS, parts, strict=True):
            np.save(temporary / f"{part}.npy", np.ascontiguousarray(array))
        # The folder appears complete or not at all.
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set FEDPPD_CACHE to a writable folder"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time; the lock goes with the process, so a crash cannot leave it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
