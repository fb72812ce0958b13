"""Rows of a user's own that belong to no class (`evaluation.ood: /path`), read where they lie; none is copied there."""

from pathlib import Path
from typing import Any

import numpy as np

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.data.encoding import encode
from fedppd_ray.data.parts import Values
from fedppd_ray.data.pixels import to_predict
from fedppd_ray.data.readers import tables
from fedppd_ray.data.readers.pixels import SUFFIXES, decode
from fedppd_ray.data.shapes import image_shape
from fedppd_ray.errors import DataError


def read_foreign(place: Path, against: DatasetInfo, rows: int) -> Values:
    """At most so many, spread evenly over the files in the order of their names, in the form of `against`."""
    if not place.exists():
        raise DataError(f"{place}: no such file or folder")
    if against.table is not None:
        path = tables.find(place, "table") if place.is_dir() else place
        if path is None:
            raise DataError(f"{place}: has no table.csv")
        encoded = encode(tables.read(path), against.table.columns, str(path))
        return encoded[spread(len(encoded), rows)]
    files = sorted(path for path in place.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"{place}: has no image files")
    wanted = to_predict(image_shape(against), against.range)
    kind: Any = {(0.0, 255.0): np.uint8, (0.0, 65535.0): np.uint16}.get(against.range, np.float32)
    return np.stack([decode(files[at], wanted).astype(kind) for at in spread(len(files), rows)])


def spread(available: int, wanted: int) -> list[int]:
    """All places, or so many of them at equal distances."""
    if available <= wanted:
        return list(range(available))
    return [available * place // wanted for place in range(wanted)]
