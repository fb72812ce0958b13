"""Bodies of rows of a table: JSON records or lists, CSV, arrays. All but arrays are for decoder processes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedppd_ray.config.table import ColumnConfig
from fedppd_ray.data.encoding import Columns, as_texts, encode, outside, parse_csv
from fedppd_ray.data.parts import RawRows
from fedppd_ray.errors import DataError
from serve.inputs import Asked, Body, check_count, refusal
from serve.refusals import invalid, malformed
from serve.takes import TableInput

Outside = list[list[str]]


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    instances: list[Any] = Field(min_length=1)
    coverage: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    confidence: float | None = Field(None, gt=0, lt=1, allow_inf_nan=False)


def decode_records(body: Body, takes: TableInput, max_rows: int) -> tuple[RawRows, Outside, Asked]:
    """`{"instances": [{column: value, …}, …]}`, or a list per row in the order of the card's columns."""
    try:
        request = _Envelope.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None
    check_count("instances", len(request.instances), max_rows, "row")
    rows = [_values(row, number, takes) for number, row in enumerate(request.instances)]
    columns = {fact.name: as_texts([row[at] for row in rows]) for at, fact in enumerate(takes.columns)}
    values, odd = encoded("instances", columns, takes)
    return values, odd, Asked(request.coverage, request.confidence)


def decode_csv(body: Body, takes: TableInput, max_rows: int) -> tuple[RawRows, Outside]:
    try:
        columns = parse_csv(bytes(body).decode("utf-8-sig"), "body")
    except UnicodeDecodeError:
        raise malformed("body", "is not UTF-8 text") from None
    except DataError as error:
        raise malformed("body", str(error).removeprefix("body: ")) from None
    check_count("body", len(next(iter(columns.values()))), max_rows, "row")
    return encoded("body", columns, takes)


def from_array(array: NDArray[Any], takes: TableInput) -> tuple[RawRows, Outside]:
    """N × columns numbers, NaN where one is missing."""
    values = array.astype(np.float64)
    return encoded("body", {fact.name: values[:, at] for at, fact in enumerate(takes.columns)}, takes)


def array_sides(takes: TableInput) -> tuple[int, ...]:
    if not takes.numeric:
        name = next(column.name for column in takes.columns if column.kind == "categorical")
        raise invalid(
            "body", f"column {name!r} has categories, which an array of numbers cannot name; send JSON or CSV"
        )
    return (len(takes.columns),)


def encoded(field: str, columns: Columns, takes: TableInput) -> tuple[RawRows, Outside]:
    """Rows as the network takes them, and what of them training has not seen."""
    try:
        return encode(columns, takes.columns, field), outside(columns, takes.columns)
    except DataError as error:
        raise invalid(field, str(error).removeprefix(f"{field}: ")) from None


def _values(row: object, number: int, takes: TableInput) -> list[str]:
    """The row's values as a CSV file would have them, in the card's order."""
    field = f"instances[{number}]"
    if isinstance(row, dict):
        absent = next((fact.name for fact in takes.columns if fact.name not in row), None)
        if absent is not None:
            raise invalid(field, f"column {absent!r} is missing; give null where its value is not known")
        cells = [row[fact.name] for fact in takes.columns]
    elif isinstance(row, list):
        if len(row) != len(takes.columns):
            raise invalid(field, f"has {len(row)} values; this model takes {len(takes.columns)}, in the card's order")
        cells = row
    else:
        raise invalid(field, "is neither an object by column name nor a list of values")
    return [_text(cell, fact, field) for cell, fact in zip(cells, takes.columns, strict=True)]


def _text(cell: object, fact: ColumnConfig, field: str) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        raise invalid(f"{field}.{fact.name}", "is neither a text, a number nor null")
    if fact.kind == "categorical" and float(cell).is_integer():
        return str(int(cell))  # JSON does not tell 3.0 from 3
    return repr(cell)
