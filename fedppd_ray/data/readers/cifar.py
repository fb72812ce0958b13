"""The python version of CIFAR-10 and CIFAR-100: pickled dictionaries of arrays.

Read here and not by torchvision, which accepts no file but the published ones (it compares md5 sums): a part of the
data set in the same format is as good. A pickle can run code, so only what numpy arrays are made of is let in.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.errors import DataError

_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True)
class Layout:
    folder: str
    archive: str
    batches: dict[PartName, tuple[str, ...]]
    labels: str  # the key that holds them


CIFAR10 = Layout(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    "labels",
)
CIFAR100 = Layout(
    "cifar-100-python", "cifar-100-python.tar.gz", {"train": ("train",), "test": ("test",)}, "fine_labels"
)


def remedy(layout: Layout, root: Path, part: PartName) -> str:
    return f"{', '.join(layout.batches[part])} of {layout.archive} into {root / layout.folder}"


def files(layout: Layout, root: Path, part: PartName) -> list[Path]:
    """The batches of this part; none while one is missing."""
    paths = [root / layout.folder / name for name in layout.batches[part]]
    return paths if all(path.exists() for path in paths) else []


def read(layout: Layout, root: Path, part: PartName) -> Split:
    splits = [_read_batch(path, layout.labels) for path in files(layout, root, part)]
    return Split(np.concatenate([s.images for s in splits]), np.concatenate([s.labels for s in splits]))


def _read_batch(path: Path, key: str) -> Split:
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        labels = np.array(content[key], np.int64)
        images = np.asarray(content["data"], np.uint8).reshape(len(labels), 3, 32, 32)
    except Exception as error:  # damaged pickles raise almost anything
        raise DataError(f"{path} is not a batch of CIFAR's python version ({error}); fetch it again") from None
    return Split(images, labels)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
