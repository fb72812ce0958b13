"""Facts of images that lie with their clients: each adds up its own, and the sums are all that leaves it.

Of 8 and 16 bits the sums are whole numbers, so that no order of adding matters.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fedppd_ray.config.nouns import FOLDER, DatasetInfo
from fedppd_ray.data.catalog import networks_for
from fedppd_ray.data.folder import class_names_of, facts_file, look_at, read_folder, rounded
from fedppd_ray.errors import DataError

_CHUNK = 1024


@dataclass(frozen=True)
class ImageSums:
    """Of one client's images: which classes there are, their shape, and per channel sums of values and of squares."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    range: tuple[float, float]
    rows: int
    total: tuple[float, ...]
    squares: tuple[float, ...]

    @property
    def pixels(self) -> int:
        return self.rows * self.shape[1] * self.shape[2]


_FORMAT = TypeAdapter(ImageSums)


def image_sums(folder: Path, data: Mapping[str, Any]) -> ImageSums:
    """What a client says of its folder. `data`: the run's section of this name, with what is stated of the images."""
    stated = {**facts_file(folder), **(data.get(FOLDER) or {})}
    skip = bool(data.get("skip_bad_files"))
    classes = tuple(stated.get("classes") or class_names_of(folder))
    shape, span = look_at(folder, stated, skip)
    if data.get("resize"):
        shape = (shape[0], *data["resize"])
    info = DatasetInfo(FOLDER, classes, shape, (0.0,) * shape[0], (1.0,) * shape[0], "none")
    split = read_folder(folder, replace(info, range=span, resize=bool(data.get("resize")), skip_bad_files=skip))
    kind = np.int64 if split.images.dtype.kind == "u" else np.float64
    total, squares = np.zeros(shape[0], kind), np.zeros(shape[0], kind)
    for start in range(0, len(split), _CHUNK):
        piece = np.asarray(split.images[start : start + _CHUNK]).astype(kind)
        total += piece.sum(axis=(0, 2, 3))
        squares += np.square(piece).sum(axis=(0, 2, 3))
    return ImageSums(
        classes, (shape[0], shape[1], shape[2]), span, len(split), tuple(total.tolist()), tuple(squares.tolist())
    )


def write_image_sums(sums: ImageSums) -> str:
    return json.dumps(asdict(sums), indent=1, ensure_ascii=False)


def read_image_sums(content: bytes) -> ImageSums:
    return _FORMAT.validate_json(content)


def folder_section(parts: Mapping[str, ImageSums], stated: Mapping[str, Any]) -> dict[str, Any]:
    """`data.folder`, complete, from what every client said; `stated` wins over what is measured."""
    (first, one), *others = parts.items()
    for client, other in others:
        for key in ("shape", "range"):
            if getattr(other, key) != getattr(one, key):
                remedy = "set data.resize" if key == "shape" else "save all images alike"
                raise DataError(
                    f"{client}: its images have {key} {getattr(other, key)}, those of {first} {getattr(one, key)}; "
                    f"{remedy}"
                )
    classes = sorted({name for part in parts.values() for name in part.classes})
    pixels = sum(part.pixels for part in parts.values())
    low, high = one.range
    mean = np.array([sum(part.total[c] for part in parts.values()) / pixels for c in range(one.shape[0])])
    squares = np.array([sum(part.squares[c] for part in parts.values()) / pixels for c in range(one.shape[0])])
    unit = (mean - low) / (high - low)
    # The mean of squares, of values that begin at 0 and end at 1.
    unit_squares = (squares - 2 * low * mean + low**2) / (high - low) ** 2
    found_mean, found_std = rounded(unit, unit_squares)
    found = {
        "classes": classes,
        "shape": list(one.shape),
        "mean": list(found_mean),
        "std": list(found_std),
        "range": list(one.range),
        "networks": networks_for(one.shape),
        "writers": False,
    }
    return {**found, **{key: value for key, value in stated.items() if value is not None}}
