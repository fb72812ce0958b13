"""A folder of image files: FOLDER/<class>/*.png|jpg|tif|npy|dcm."""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedppd_ray.data.cache import cache_root
from fedppd_ray.data.parts import BYTES, Split
from fedppd_ray.data.pixels import WORDS, Pixels, Wanted
from fedppd_ray.data.readers.pixels import SUFFIXES, decode
from fedppd_ray.errors import DataError

_SHOWN = 3  # reasons
_REST = re.compile(r" \(.*| where the others have.*|;.*", re.DOTALL)  # what is of one file only, and the remedy


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
        if path.suffix.lower() in SUFFIXES
    ]


def read(folder: Path, classes: Sequence[str], wanted: Wanted, skip_bad: bool = False) -> Split:
    """Every file as a row. One that cannot be used is refused by name or, with `skip_bad`, left out and counted."""
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in class_names(folder) if name not in numbers]
    if unknown:
        raise DataError(f"{folder / unknown[0]}: a folder of no class; the classes are {', '.join(classes)}")
    labels: list[int] = []
    refused: dict[str, str] = {}
    found = files(folder)
    rows = _on_disk((max(1, len(found)), *wanted.shape), wanted)
    for path in found:
        try:
            rows[len(labels)] = decode(path, wanted)
            labels.append(numbers[path.parent.name])
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{error} (data.skip_bad_files: true leaves such files out)") from None
            refused[str(path.relative_to(folder))] = str(error).replace(str(path), "it")
    if not labels:
        first = next(iter(refused.values()), "no file")
        raise DataError(f"{folder}: none of its files can be used; the first: {first}")
    return Split(rows[: len(labels)], np.array(labels, np.int64), skipped=refused)


def _on_disk(shape: tuple[int, ...], wanted: Wanted) -> Pixels:
    """An array in a file without a name, which goes with the array: pictures may be more than fits in memory."""
    kind = {BYTES: np.uint8, WORDS: np.uint16}.get(wanted.range, np.float32)
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root) as file:
        return np.memmap(file, kind, "w+", shape=shape)


def summary(skipped: Mapping[str, str]) -> str:
    """How many files were left out, and the reasons: no name of a file."""
    if not skipped:
        return ""
    reasons = Counter(_REST.sub("", reason.removeprefix("it: ")) for reason in skipped.values())
    shown = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(_SHOWN))
    return f"{len(skipped)} files left out ({shown}{'; …' if len(reasons) > _SHOWN else ''})"
