"""The table that users bring: ROOT/{train,test}.csv, or ROOT/clients/<id>.csv where each client has rows of its own.

What is known of all rows (kinds, categories, means, deviations) is put together from sums that each file gives by
itself (`sums_of`): where clients hold their files, these sums are all that leaves them, never a row. A sum over a file
of few rows says much about them; docs/data.md tells what leaks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.table import TABLE, ColumnConfig, TableConfig
from fedppd_ray.data import cache
from fedppd_ray.data.encoding import Columns, Floats, encode
from fedppd_ray.data.hospital import breast_cancer
from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.data.readers import tables
from fedppd_ray.errors import DataError
from fedppd_ray.seeding import numpy_generator_for

_MOST_CATEGORIES = 100
_SHIFT = 4.0  # standard deviations

Kind = Literal["numeric", "categorical", "empty", "many", "mixed"]


# ---- facts, from sums


@dataclass(frozen=True)
class ColumnSums:
    """Of one column in one file: nothing but counts, sums and extremes; of texts, which there are."""

    rows: int = 0
    missing: int = 0
    kind: Kind = "empty"
    total: float = 0.0
    squares: float = 0.0  # about the file's own mean: E[x²] − E[x]² is all rounding where deviations are small
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()  # none where there are too many: they would be names

    def __add__(self, other: "ColumnSums") -> "ColumnSums":
        lows, highs = ([end for end in ends if end is not None] for ends in zip(self._ends, other._ends, strict=True))
        return ColumnSums(
            self.rows + other.rows,
            self.missing + other.missing,
            _merged_kind(self.kind, other.kind),
            self.total + other.total,
            self.squares + other.squares + self._apart(other),
            min(lows, default=None),
            max(highs, default=None),
            tuple(sorted({*self.categories, *other.categories})),
        )

    @property
    def given(self) -> int:
        return self.rows - self.missing

    def _apart(self, other: "ColumnSums") -> float:
        """What the distance of two means adds to the squares about the mean of both."""
        if self.given == 0 or other.given == 0:
            return 0.0
        distance = self.total / self.given - other.total / other.given
        return distance**2 * self.given * other.given / (self.given + other.given)

    @property
    def _ends(self) -> tuple[float | None, float | None]:
        return self.low, self.high


Sums = Mapping[str, ColumnSums]  # what a client says of its table


def _merged_kind(one: Kind, other: Kind) -> Kind:
    if one == other or "empty" in (one, other):
        return one if other == "empty" else other
    return "many" if "many" in (one, other) else "mixed"


def sums_of(values: NDArray[Any], kind: str | None = None, most: int = _MOST_CATEGORIES) -> ColumnSums:
    """What a client says of a column. Of numbers, no value but the least and the largest leaves it."""
    given = [value for value in values.tolist() if value is not None]
    rows, missing = len(values), len(values) - len(given)
    if not given:
        return ColumnSums(rows, missing)
    numbers = None if kind == "categorical" else _as_numbers(given)
    if numbers is None:
        found = tuple(sorted(set(given)))
        if len(found) > most:
            return ColumnSums(rows, missing, "many")
        return ColumnSums(rows, missing, "categorical", categories=found)
    ends = float(numbers.min()), float(numbers.max())
    squares = float(((numbers - numbers.mean()) ** 2).sum())
    return ColumnSums(rows, missing, "numeric", float(numbers.sum()), squares, *ends)


def _as_numbers(given: Sequence[str]) -> NDArray[np.float64] | None:
    try:
        numbers = np.array([float(value) for value in given], np.float64)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def column_facts(name: str, sums: ColumnSums, kind: str | None) -> ColumnConfig:
    """The facts that all clients share, from the sum of their sums."""
    missing = sums.missing > 0
    if kind == "numeric" and sums.kind not in ("numeric", "empty"):
        raise DataError(f"data.table.kinds: {name} is not numeric: it holds {_example(sums.categories)!r}")
    if sums.kind == "mixed":
        raise DataError(
            f"data.table: column {name!r} has numbers in one file, texts ({_example(sums.categories)!r}) in another; "
            f"mend the one, or say kinds: {{{name}: categorical}}"
        )
    if sums.kind == "many" or len(sums.categories) > _MOST_CATEGORIES:
        raise DataError(
            f"data.table: column {name!r} has more than {_MOST_CATEGORIES} different texts; put it into "
            f"data.table.ignore, or group its values"
        )
    if sums.kind == "categorical":
        return ColumnConfig(name=name, kind="categorical", categories=sums.categories, missing=missing)
    count = max(1, sums.given)
    mean = sums.total / count
    # A constant has no deviation to divide by, whatever rounding has left of one.
    std = 0.0 if sums.low == sums.high else float(np.sqrt(sums.squares / count))
    ends = {"low": sums.low, "high": sums.high}
    return ColumnConfig(name=name, kind="numeric", mean=mean, std=std or 1.0, missing=missing, **ends)


def _example(values: Sequence[str]) -> str:
    return next((value for value in values if _as_numbers([value]) is None), "")


def table_facts(root: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The section `data.table`, all of it, from what the user gave of it and from the files."""
    given = checked_options(data.get(TABLE) or {})
    embedded = given.get("embedded")
    parts = [breast_cancer("train")] if embedded else [tables.read(path) for path in _training_files(root)]
    return facts_of([table_sums(part, given) for part in parts], given, str(root))


def checked_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the user says of a table: enough to look at files by."""
    unknown = set(given) - set(TableConfig.model_fields)
    if unknown or not isinstance(given.get("target"), str):
        what = f"unknown key {sorted(unknown)[0]!r}" if unknown else "target is missing: the column to predict"
        raise DataError(f"data.table: {what}")
    return given


def table_sums(columns: Columns, given: Mapping[str, Any]) -> dict[str, ColumnSums]:
    """All that leaves a client of its table so that the facts can be put together; of ignored columns, nothing."""
    kinds = {**(given.get("kinds") or {}), given["target"]: "categorical"}
    left_out = {*(given.get("ignore") or ()), given.get("client_column")}
    sums = {name: sums_of(values, kinds.get(name)) for name, values in columns.items() if name not in left_out}
    by = str(given.get("client_column"))
    if by in columns:  # as many clients as there are
        sums[by] = sums_of(columns[by], "categorical", len(columns[by]))
    return sums


def facts_of(parts: Sequence[Sums], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The section `data.table` from what every client said."""
    target, by, kinds = given["target"], given.get("client_column"), given.get("kinds") or {}
    names = _shared_columns(parts, where, [target, *([by] if by else [])])
    total = {name: sum((part[name] for part in parts), ColumnSums()) for name in names}
    columns = [
        column_facts(name, total[name], kinds.get(name)).model_dump(mode="json", exclude_defaults=True)
        for name in names
        if name not in (target, by)
    ]
    if total[target].kind == "many":
        raise DataError(f"data.table.target: {target!r} has more than {_MOST_CATEGORIES} values; it must name classes")
    found = {
        "classes": list(total[target].categories),
        "clients": list(total[by].categories) if by else [],
        "columns": columns,
    }
    return {**found, **given}


def _training_files(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; set data.root to the folder that holds train.csv and test.csv")
    own = [path for name in table_clients(root) if (path := tables.find(root / "clients", name))]
    train = tables.find(root, "train")
    if not own and train is None:
        raise DataError(f"{root}: has neither train.csv nor clients/<id>.csv; see docs/data.md for the layouts")
    if tables.find(root, "test") is None:
        raise DataError(f"{root}: has no test.csv; put rows there that no client trains on")
    return [*([train] if train else []), *own]


def _shared_columns(parts: Sequence[Sums], where: str, needed: Sequence[str]) -> list[str]:
    names = list(parts[0])
    for part in parts[1:]:
        if odd := sorted(set(names) ^ set(part)):
            raise DataError(f"{where}: the files' columns differ: {odd[0]!r} is not in all of them")
    for name in needed:
        if name not in names:
            raise DataError(f"data.table: there is no column {name!r}; the columns are {', '.join(names[:20])}")
    return names


def table_clients(root: Path) -> list[str]:
    """Who has a file in ROOT/clients."""
    folder = root / "clients"
    return sorted({path.stem for path in folder.iterdir() if path.suffix in tables.SUFFIXES}) if folder.is_dir() else []


# ---- parts


def read_table(root: Path, part: PartName, info: DatasetInfo) -> Split:
    """The common training part, or the test part."""
    facts: TableConfig = info.table
    if facts.embedded:
        place = cache.entry(f"{facts.embedded}-{part}-{_identity(facts)}", None, [])
        cache.fill(place, lambda: _split(breast_cancer(part), facts, facts.embedded or "", by_client=part == "train"))
        return cache.read(place)
    path = tables.find(root, part)
    if path is None:
        raise DataError(f"{root}: has no {part}.csv; see docs/data.md for the layouts")
    return read_table_file(path, info, by_client=part == "train")


def read_table_file(path: Path, info: DatasetInfo, by_client: bool = False) -> Split:
    """One file, parsed into the cache once; a folder stands for the table.csv in it, or the only file."""
    if path.is_dir():
        path = tables.find(path, "table") or path / "table.csv"
    facts: TableConfig = info.table
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the client's table there, as CSV")
    place = cache.entry(f"{TABLE}-{_identity(facts)}-{int(by_client)}", path.parent, [path])
    cache.fill(place, lambda: _split(tables.read(path), facts, str(path), by_client))
    return cache.read(place)


def _identity(facts: TableConfig) -> str:
    return cache.digest(facts.model_dump_json())


def _split(columns: Columns, facts: TableConfig, where: str, by_client: bool) -> Split:
    if facts.target not in columns:
        raise DataError(f"{where}: the target column {facts.target!r} is missing")
    labels = _numbered(columns[facts.target], facts.classes, facts.target, where)
    if len(labels) == 0:
        raise DataError(f"{where}: holds no row; give it some, or leave it out")
    writers = None
    if by_client and facts.client_column:
        writers = _numbered(columns[facts.client_column], facts.clients, facts.client_column, where)
    return Split(encode(columns, facts.columns, where), labels, writers)


def _numbered(values: NDArray[np.object_], known: Sequence[str], name: str, where: str) -> NDArray[np.int64]:
    numbers = {value: number for number, value in enumerate(known)}
    labels = np.array([numbers.get(value, -1) for value in values], np.int64)
    if (labels < 0).any():
        row = int(np.flatnonzero(labels < 0)[0])
        found = "nothing" if values[row] is None else repr(values[row])
        raise DataError(
            f"{where}: row {row + 1}, column {name!r}: {found} is none of {', '.join(known)}; mend or remove the row"
        )
    return labels


def shifted_rows(rows: Floats, facts: TableConfig) -> Floats:
    """Rows that no client has: half of the numeric columns moved by four deviations, up or down, row by row.

    A table has no other table that is held against it by nature; these are implausible patients, seeded.
    """
    generator = numpy_generator_for(0, f"shifted/{rows.shape}")
    moved = np.array(rows, np.float32)
    at = 0
    for column in facts.columns:
        if column.kind == "numeric":
            chosen = generator.random(len(rows)) < 0.5
            moved[:, at] += chosen * np.where(generator.random(len(rows)) < 0.5, -_SHIFT, _SHIFT)
        else:  # another category than the row's
            width = len(column.categories)
            moved[:, at : at + width] = np.roll(moved[:, at : at + width], 1, axis=1)
        at += column.width
    return moved


def incomplete(given: Mapping[str, Any]) -> bool:
    return "columns" not in given or "classes" not in given
