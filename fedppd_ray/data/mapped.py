"""Rows that are too many to copy stay in the file that every process of a node maps, and are read when asked for."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.data.parts import Values

Indices = NDArray[np.int64]
# Rows that would take more than this in memory stay in their file. A process copies less than that for speed.
MOST_RESIDENT_BYTES = 2**30


class MappedRows:
    """Some rows of a map, as far as those who ask for rows by number are concerned an array of them."""

    def __init__(self, source: Values, rows: Indices) -> None:
        self._source, self._rows = source, rows
        self.dtype, self.ndim, self.shape = source.dtype, source.ndim, (len(rows), *source.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: Any) -> Values:
        rows: Values = self._source[self._rows[chosen]]
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        return np.asarray(self._source[self._rows], dtype)

    def chosen(self, rows: Indices) -> "MappedRows":
        return MappedRows(self._source, self._rows[rows])


def rows_of(values: Values, rows: Indices) -> Values:
    """These rows: a copy, or, where the array stays in its file, a note of which they are."""
    if isinstance(values, MappedRows):
        return cast(Values, values.chosen(rows))
    return cast(Values, MappedRows(values, rows)) if stays_mapped(values) else values[rows]


def stays_mapped(values: Values) -> bool:
    """Whether these rows are in a file and too many to copy."""
    if isinstance(values, MappedRows):
        return True
    resident = 1 if values.dtype == np.uint8 else 4  # as a shard holds them
    return values.size * resident > MOST_RESIDENT_BYTES and _is_map(values)


def _is_map(values: Any) -> bool:
    while values is not None and not isinstance(values, np.memmap):
        values = getattr(values, "base", None)
    return values is not None
