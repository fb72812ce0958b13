"""Data sets as uint8 arrays, parsed once per machine and memory-mapped by every process that needs them.

`load` gives a data set whose parts are mapped when they are first asked for: ten actors on a node share one copy, and
who wants the test rows needs no training files. `prepare` does the parsing ahead of time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedppd_ray.config.data import is_place
from fedppd_ray.config.nouns import DATASETS, FOLDER, DatasetInfo
from fedppd_ray.config.table import SHIFTED, TABLE
from fedppd_ray.data import cache, sources
from fedppd_ray.data.cache import data_root
from fedppd_ray.data.folder import describe_folder, read_folder
from fedppd_ray.data.foreign import read_foreign
from fedppd_ray.data.glyphs import draw_glyphs
from fedppd_ray.data.parts import Images, Labels, PartName, Split, Values
from fedppd_ray.data.shapes import fitted, image_shape, in_range
from fedppd_ray.data.table import read_table, shifted_rows
from fedppd_ray.errors import DataError
from fedppd_ray.seeding import numpy_generator_for

__all__ = ["Dataset", "Images", "Labels", "Split", "Values", "dataset_info", "load", "load_ood", "prepare"]

PARTS: tuple[PartName, ...] = ("train", "test")


@dataclass(frozen=True)
class Dataset:
    info: DatasetInfo
    root: Path

    @cached_property
    def train(self) -> Split:
        return self._part("train")

    @cached_property
    def test(self) -> Split:
        return self._part("test")

    def _part(self, part: PartName) -> Split:
        if self.info.name == FOLDER:
            return read_folder(self.root / part, self.info)
        if self.info.name == TABLE:
            return read_table(self.root, part, self.info)
        return cache.read(_prepare_part(self.info, self.root, part))


def dataset_info(name: str, root: str | None = None) -> DatasetInfo:
    """The facts of a data set by name; a user's own folder is looked at."""
    if name == FOLDER:
        return describe_folder(data_root(root))
    if name not in sources.SOURCES:
        known = ", ".join(sorted([*sources.SOURCES, FOLDER]))
        raise DataError(f"data set {name!r} has no files to prepare; choose one of {known}")
    return DATASETS[name]


def prepare(
    name: str, root: str | None = None, parts: Sequence[PartName] = PARTS, info: DatasetInfo | None = None
) -> None:
    """Make sure that these parts can be read, and that what needs parsing is parsed."""
    dataset = load(name, root, info)
    for part in parts:
        getattr(dataset, part)


def load(name: str, root: str | None = None, info: DatasetInfo | None = None) -> Dataset:
    """The data set, as memory-mapped arrays. `info` spares a look at a user's folder whose facts are known."""
    return Dataset(info or dataset_info(name, root), data_root(root))


def load_ood(name: str, against: DatasetInfo, root: str | None = None, rows: int = 2000) -> Values:
    """Rows that do not belong to `against`, in its shape and range of values.

    Images are drawn, or the test rows of another set, resized; rows of a table are its test rows, moved; or what a
    user has under a path, at most `rows` of it.
    """
    if is_place(name):
        return read_foreign(Path(name).expanduser(), against, rows)
    if against.table is not None:
        return shifted_rows(load(against.name, root, against).test.images, against.table)
    shape = image_shape(against)
    if name in _DRAWN:
        return in_range(_DRAWN[name](rows, shape), against.range)
    # A user's own folder is no place for files of other sets, which may be downloaded.
    elsewhere = None if against.name == FOLDER else root
    return in_range(fitted(load(DATASETS[name].files or name, elsewhere).test.images, shape), against.range)


def resized_from(name: str, against: DatasetInfo) -> tuple[int, int, int] | None:
    """The shape that an out-of-distribution set has of its own, where that is another than `against` has."""
    if name in _NO_FILES or is_place(name):
        return None
    own = image_shape(DATASETS[DATASETS[name].files or name])
    return None if own == against.shape else own


def draw_noise(rows: int, shape: tuple[int, int, int]) -> Images:
    """Pixels by chance, each channel by itself: uniform in even rows, Gaussian around grey in odd ones."""
    generator = numpy_generator_for(0, f"noise/{shape}")
    images = generator.integers(0, 256, (rows, *shape), dtype=np.uint8)
    grey = 127.5 + 64 * generator.standard_normal(images[1::2].shape)
    images[1::2] = np.rint(np.clip(grey, 0, 255))
    return images


_DRAWN: Mapping[str, Callable[[int, tuple[int, int, int]], Images]] = {"glyphs": draw_glyphs, "noise": draw_noise}
_NO_FILES = (*_DRAWN, SHIFTED)


def prepare_ood(name: str, against: DatasetInfo, root: str | None = None) -> None:
    """Make sure that an out-of-distribution set can be read."""
    if is_place(name):
        read_foreign(Path(name).expanduser(), against, rows=1)
    elif name not in _NO_FILES:
        prepare(DATASETS[name].files or name, None if against.name == FOLDER else root, ("test",))


def _prepare_part(info: DatasetInfo, root: Path, part: PartName) -> Path:
    """The cache folder of a part, filled."""
    source, title = sources.SOURCES[info.name], f"{info.name}-{part}"
    if source.embedded:
        folder = cache.entry(title, None, [])
    else:
        files = source.files(root, part)
        known = None if files else cache.newest_entry(title, root)
        if known is not None:
            return known
        if not files:
            with cache.fetching(info.name, root):
                if not source.files(root, part):
                    sources.fetch(info.name, root, part)
        folder = cache.entry(title, root, source.files(root, part))
    cache.fill(folder, lambda: _fitting(info, source.read(root, part), root, part))
    return folder


def _fitting(info: DatasetInfo, split: Split, root: Path, part: PartName) -> Split:
    """Refuse files that are sound but of another data set, before they get into the cache."""
    images, labels = split.images, split.labels
    if labels.ndim != 1 or images.shape != (len(labels), *info.shape):
        raise DataError(
            f"{info.name} under {root}: {part} images of shape {images.shape} and labels of shape {labels.shape} "
            f"are not rows of {info.shape} with a label each; fetch the files again"
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= len(info.classes):
        raise DataError(
            f"{info.name} under {root}: {part} labels are not 0 to {len(info.classes) - 1}; fetch the files again"
        )
    return split
