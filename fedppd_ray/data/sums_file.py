"""What a client says of its table, as a file that its people can read before they send it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedppd_ray.config.table import TABLE
from fedppd_ray.data.image_sums import read_image_sums
from fedppd_ray.data.readers import tables
from fedppd_ray.data.table import ColumnSums, Sums, checked_options, facts_of, table_sums
from fedppd_ray.errors import DataError

_FORMAT = TypeAdapter(dict[str, ColumnSums])


def sums_of_file(path: Path, given: Mapping[str, Any]) -> dict[str, ColumnSums]:
    """Made where the file is; a folder stands for the table.csv in it."""
    if path.is_dir():
        path = tables.find(path, "table") or path / "table.csv"
    sums = table_sums(tables.read(path), checked_options(given))
    if given["target"] not in sums:
        raise DataError(f"{path}: the target column {given['target']!r} is missing")
    return sums


def write_sums(sums: Sums) -> str:
    return json.dumps({name: asdict(column) for name, column in sums.items()}, indent=1, ensure_ascii=False)


def read_sums(path: Path) -> dict[str, ColumnSums]:
    try:
        return _FORMAT.validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: is no file of `fedppd data sums` ({where}: {first['msg']})") from None


def read_any_sums(path: Path, data: Mapping[str, Any]) -> Any:
    """Of a table or of images, as the run's data are."""
    if data["name"] == TABLE:
        return read_sums(path)
    try:
        return read_image_sums(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise DataError(f"{path}: is no file of `fedppd data sums` ({error.errors()[0]['msg']})") from None


def section_of(parts: Sequence[Sums], given: Mapping[str, Any]) -> dict[str, Any]:
    """`data.table`, complete, to be put into the configuration."""
    return facts_of(parts, checked_options(given), "the clients")
