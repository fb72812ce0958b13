"""A table's columns as a network's numbers: the one treatment that training, `predict` and the service share.

Neither torch nor pandas: the service's decoder processes import this file and little else.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.table import ColumnConfig
from fedppd_ray.errors import DataError

_MISSING = frozenset(("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"))

# Name → a value per row: text, None where it is missing; or floats, NaN where it is.
Columns = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]


def parse_csv(text: str, where: str) -> Columns:
    """The columns of a CSV file, as text; a line that does not fit the header is named."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(header, where)
        rows: list[list[str]] = []
        for row in reader:
            if len(row) != len(header):
                if not row:
                    continue  # an empty line
                raise DataError(f"{where}: line {reader.line_num} has {len(row)} values, the header {len(header)}")
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{where}: line {reader.line_num} cannot be read as CSV ({error})") from None
    return {name: as_texts([row[at] for row in rows]) for at, name in enumerate(header)}


def _check_header(header: Sequence[str], where: str) -> None:
    if not any(header):
        raise DataError(f"{where}: is empty; its first line must name the columns")
    twice = next((name for at, name in enumerate(header) if name in header[:at]), None)
    if twice is not None:
        raise DataError(f"{where}: column {twice!r} comes twice; name each once")


def as_texts(values: Sequence[str]) -> NDArray[np.object_]:
    """None for each of the spellings of a missing value."""
    texts = np.empty(len(values), object)
    texts[:] = [None if (text := value.strip()) in _MISSING else text for value in values]
    return texts


def encode(columns: Columns, facts: Sequence[ColumnConfig], where: str) -> Floats:
    """Rows × numbers: standardised, one-hot, and an indicator where values were missing in training.

    A missing number counts as the mean; a category that was not seen in training has no 1 at all.
    """
    rows = len(next(iter(columns.values()))) if columns else 0
    pieces: list[NDArray[np.float64]] = []
    for fact in facts:
        if fact.name not in columns:
            raise DataError(f"{where}: column {fact.name!r} is missing")
        values = columns[fact.name]
        absent = _absent(values)
        if fact.kind == "numeric":
            numbers = np.where(absent, fact.mean, _numbers(values, absent, fact.name, where))
            pieces.append(((numbers - fact.mean) / fact.std)[:, None])
        else:
            pieces.append(np.stack([values == category for category in fact.categories], 1).astype(np.float64))
        if fact.missing:
            pieces.append(absent[:, None].astype(np.float64))
    encoded = np.concatenate(pieces, 1) if pieces else np.empty((rows, 0))
    return encoded.astype(np.float32)


def outside(columns: Columns, facts: Sequence[ColumnConfig]) -> list[list[str]]:
    """Per row, the columns whose value is beyond what training saw: outside its range, or of another category."""
    rows = len(next(iter(columns.values()))) if columns else 0
    found: list[list[str]] = [[] for _ in range(rows)]
    for fact in facts:
        values = columns[fact.name]
        absent = _absent(values)
        if fact.kind == "categorical":
            odd = ~np.isin(values.astype(str), fact.categories)
        elif fact.low is None or fact.high is None:
            odd = np.zeros(rows, bool)
        else:
            numbers = _numbers(values, absent, fact.name, "rows")
            odd = (numbers < fact.low) | (numbers > fact.high)
        for row in np.flatnonzero(np.where(absent, not fact.missing, odd)):
            found[row].append(fact.name)
    return found


def _absent(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "f":
        missing: NDArray[np.bool_] = np.isnan(values)
        return missing
    return np.array([value is None for value in values.tolist()], bool)


def _numbers(values: NDArray[Any], absent: NDArray[np.bool_], name: str, where: str) -> NDArray[np.float64]:
    """0 where a value is missing."""
    try:
        numbers = np.where(absent, 0 if values.dtype.kind == "f" else "0", values).astype(np.float64)
    except ValueError:
        numbers = np.full(len(values), np.nan)
        for row, value in enumerate(values):
            try:
                numbers[row] = 0.0 if value is None else float(value)
            except ValueError:
                break
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise DataError(
            f"{where}: row {row + 1}, column {name!r}: {str(values[row])[:100]!r} is not a number; "
            f"mend it, or leave it empty"
        )
    return numbers
