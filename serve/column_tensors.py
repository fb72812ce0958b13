"""Rows of a table in the Open Inference Protocol: a tensor per column, by the column's name.

Numbers are FP64 (any number type is taken), NaN or null where one is missing; texts are BYTES, empty or null where one
is missing. Binary tensors follow each other in the order of the inputs.
"""

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.table import ColumnConfig
from fedppd_ray.data.encoding import Columns, as_texts
from serve.inputs import Body, check_count
from serve.refusals import invalid
from serve.takes import TableInput
from serve.tensors import NUMBER_TYPES, ROW_OUTPUTS, InputTensor, Wish, read_request, wish_of

DATATYPES = {"numeric": "FP64", "categorical": "BYTES"}
_TEXT = "BYTES"


def read_columns(content: Body, length: int, takes: TableInput, max_rows: int) -> tuple[Wish, Columns]:
    request = read_request(content, length)
    facts = {fact.name: fact for fact in takes.columns}
    given: dict[str, int] = {}
    for number, tensor in enumerate(request.inputs):
        if tensor.name not in facts or tensor.name in given:
            problem = "comes twice" if tensor.name in given else "is no column of this model"
            raise invalid(f"inputs[{number}].name", f"{tensor.name[:100]!r} {problem}")
        given[tensor.name] = number
    absent = next((name for name in facts if name not in given), None)
    if absent is not None:
        raise invalid("inputs", f"column {absent!r} is missing; send a tensor for each of the {len(facts)} columns")
    rows = _rows(request.inputs[0], max_rows)
    columns, start = {}, length
    for number, tensor in enumerate(request.inputs):
        size = tensor.parameters.binary_data_size
        binary = None if size is None else memoryview(content)[start : start + size]
        start += size or 0
        columns[tensor.name] = _column(tensor, f"inputs[{number}]", binary, rows, facts[tensor.name])
    if start != len(content):
        raise invalid("inputs", f"{len(content) - length} binary bytes sent, {start - length} announced")
    return wish_of(request, ROW_OUTPUTS), columns


def _rows(tensor: InputTensor, max_rows: int) -> int:
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ([], [1]):
        raise invalid("inputs[0].shape", f"{tensor.shape} is not [N] or [N, 1]")
    check_count("inputs[0].shape", tensor.shape[0], max_rows, "row")
    return tensor.shape[0]


def _column(tensor: InputTensor, field: str, binary: memoryview | None, rows: int, fact: ColumnConfig) -> NDArray[Any]:
    if tensor.shape not in ([rows], [rows, 1]):
        raise invalid(f"{field}.shape", f"{tensor.shape} is not [{rows}], as the first column has")
    if tensor.datatype == _TEXT:
        values = _listed(tensor, field, rows, str) if binary is None else _texts(binary, field, rows)
        return as_texts(["" if value is None else value for value in values])
    if fact.kind == "categorical" or tensor.datatype not in NUMBER_TYPES:
        raise invalid(f"{field}.datatype", f"{tensor.datatype[:100]!r} is not {DATATYPES[fact.kind]}")
    if binary is None:
        return np.array([math.nan if v is None else v for v in _listed(tensor, field, rows, float)], np.float64)
    dtype = np.dtype(NUMBER_TYPES[tensor.datatype])
    if len(binary) != rows * dtype.itemsize:
        raise invalid(f"{field}.parameters.binary_data_size", f"is not {rows * dtype.itemsize}")
    return np.frombuffer(binary, dtype).astype(np.float64)


def _listed(tensor: InputTensor, field: str, rows: int, kind: type[str] | type[float]) -> list[Any]:
    found = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in tensor.data or []]
    if len(found) != rows:
        raise invalid(f"{field}.data", f"has {len(found)} values; the shape takes {rows}")
    allowed = {str, type(None)} if kind is str else {int, float, type(None)}
    if not set(map(type, found)) <= allowed:
        raise invalid(
            f"{field}.data", f"holds something that is neither {'a text' if kind is str else 'a number'} nor null"
        )
    if kind is float and any(value is not None and abs(value) > 1e308 for value in found):
        raise invalid(f"{field}.data", "holds a number too large")
    return found


def _texts(binary: memoryview, field: str, rows: int) -> list[str]:
    """Each with its length before it, in four bytes."""
    texts: list[str] = []
    at = 0
    try:
        for _ in range(rows):
            (size,) = struct.unpack_from("<I", binary, at)
            if at + 4 + size > len(binary):
                raise ValueError("a text is cut short")
            texts.append(bytes(binary[at + 4 : at + 4 + size]).decode())
            at += 4 + size
    except (struct.error, ValueError):
        at = -1
    if at != len(binary):
        raise invalid(
            f"{field}.data", f"its binary bytes are not {rows} texts of UTF-8, each with its length before it"
        )
    return texts
