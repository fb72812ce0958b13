"""Request bodies of the Open Inference Protocol v2 (REST), with Triton's binary tensors. No web framework here."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

from serve.inputs import Asked, Body, check_count
from serve.refusals import invalid, malformed
from serve.takes import ImageInput

INPUT = "image"
OUTPUTS = {
    "label": "INT64",
    "class_name": "BYTES",
    "probabilities": "FP64",
    "entropy": "FP64",
    "normalized_entropy": "FP64",
    "abstain": "BOOL",
    "ood": "BOOL",
}
# Rows × classes, where a confidence is asked for: whether the class is in the row's set.
SET = "set"
# Of rows of a table: the columns beyond what training saw, with semicolons between them.
ROW_OUTPUTS = OUTPUTS | {"outside": "BYTES"}
ANY_OUTPUTS = ROW_OUTPUTS | {SET: "BOOL"}
WIDE = ("probabilities", SET)  # a number for each class
NUMBER_TYPES = {
    "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
    "UINT64": "<u8", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
HEADER_LENGTH = "Inference-Header-Content-Length"
# Strings that a short request may hold and still be parsed where it arrives.
QUOTES = 256
_MOST_DIMENSIONS = 4
_MOST_INPUTS = 2**14  # columns of a table
_LENGTH = re.compile(r"[0-9]{1,18}")

# A size of more digits than this cannot be meant, and arithmetic with thousands of digits is slow or fails.
Size = Annotated[StrictInt, Field(ge=-(2**31), le=2**31)]


class _Loose(BaseModel):
    """Clients send parameters of their own; what is not known here is left alone, as the protocol asks."""

    model_config = ConfigDict(extra="allow")


class InputParameters(_Loose):
    binary_data_size: StrictInt | None = Field(None, ge=0, le=2**40)


class OutputParameters(_Loose):
    binary_data: StrictBool | None = None


class RequestParameters(_Loose):
    binary_data_output: StrictBool = False
    coverage: float | None = Field(None, gt=0, le=1, strict=True, allow_inf_nan=False)
    confidence: float | None = Field(None, gt=0, lt=1, strict=True, allow_inf_nan=False)


class InputTensor(_Loose):
    name: StrictStr
    shape: list[Size] = Field(max_length=_MOST_DIMENSIONS)
    datatype: StrictStr
    data: list[Any] | None = None
    parameters: InputParameters = InputParameters()


class OutputRequest(_Loose):
    name: StrictStr
    parameters: OutputParameters = OutputParameters()


class InferRequest(_Loose):
    id: Annotated[StrictStr, Field(max_length=1024)] | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=_MOST_INPUTS)
    outputs: list[OutputRequest] | None = Field(None, max_length=len(OUTPUTS) + 2)
    parameters: RequestParameters = RequestParameters()


@dataclass(frozen=True)
class Wish:
    """What a request asks for, besides the answer to its images."""

    id: str | None
    coverage: float | None
    outputs: dict[str, bool]  # names, and whether as binary
    confidence: float | None = None

    def asked(self, card: Mapping[str, Any]) -> Asked:
        """Who names the output `set` and no confidence gets the card's."""
        own = (card.get("conformal") or {}).get("confidence", 0.5)  # without calibration rows any is refused
        return Asked(self.coverage, own if self.confidence is None and SET in self.outputs else self.confidence)


def json_length(content: Body, header: str | None) -> int:
    """Bytes of the body's JSON part; a tensor's bytes may follow it."""
    if header is None:
        return len(content)
    if not _LENGTH.fullmatch(header) or int(header) > len(content):
        raise malformed(HEADER_LENGTH, f"{header[:40]!r} is not a length within the body")
    return int(header)


def read_request(content: Body, length: int) -> InferRequest:
    try:
        parsed = from_json(bytes(content[:length]), allow_inf_nan=False)
    except ValueError as error:
        raise malformed("body", f"is not JSON: {error}") from None
    try:
        return InferRequest.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise invalid(".".join(map(str, first["loc"])) or "body", first["msg"]) from None


def read_tensors(content: Body, length: int, takes: ImageInput, max_images: int) -> tuple[Wish, NDArray[Any]]:
    """The request, and its images as an array N×H×W[×C] whose values are yet to be checked."""
    request = read_request(content, length)
    if len(request.inputs) != 1:
        raise invalid("inputs", f"there are {len(request.inputs)}; this model takes one, called {INPUT!r}")
    array = _array(request.inputs[0], memoryview(content)[length:], takes.sides, max_images)
    return wish_of(request, OUTPUTS), array


def wish_of(request: InferRequest, known: Mapping[str, str]) -> Wish:
    wanted = request.parameters
    if request.outputs or wanted.confidence is not None:
        known = {**known, SET: ANY_OUTPUTS[SET]}
    return Wish(request.id, wanted.coverage, _outputs(request, known), wanted.confidence)


def _array(tensor: InputTensor, binary: memoryview, wanted: tuple[int, ...], max_images: int) -> NDArray[Any]:
    if tensor.name != INPUT:
        raise invalid("inputs[0].name", f"{tensor.name[:100]!r} is unknown; the input is called {INPUT!r}")
    if tensor.datatype not in NUMBER_TYPES:
        raise invalid("inputs[0].datatype", f"{tensor.datatype[:100]!r} is not one of {', '.join(NUMBER_TYPES)}")
    if tuple(tensor.shape[1:]) != wanted or not tensor.shape:
        raise invalid("inputs[0].shape", f"{tensor.shape} is not [N, {', '.join(map(str, wanted))}]")
    check_count("inputs[0].shape", tensor.shape[0], max_images)
    values = _binary(tensor, binary) if tensor.parameters.binary_data_size is not None else _listed(tensor)
    return values.reshape(tensor.shape)


def _binary(tensor: InputTensor, binary: memoryview) -> NDArray[Any]:
    dtype = np.dtype(NUMBER_TYPES[tensor.datatype])
    needed = math.prod(tensor.shape) * dtype.itemsize
    if tensor.parameters.binary_data_size != needed or len(binary) != needed:
        raise invalid(
            "inputs[0].parameters.binary_data_size",
            f"{tensor.parameters.binary_data_size} bytes announced and {len(binary)} sent; the shape takes {needed}",
        )
    return np.frombuffer(binary, dtype)


def _listed(tensor: InputTensor) -> NDArray[np.float64]:
    """Flat or nested numbers; booleans and strings are not numbers."""
    flat: list[Any] = tensor.data or []
    for _ in range(_MOST_DIMENSIONS):
        kinds = set(map(type, flat))
        if kinds <= {int, float}:
            break
        if kinds != {list}:
            raise invalid("inputs[0].data", "is ragged, or holds something that is not a number")
        flat = list(chain.from_iterable(flat))
    else:
        raise invalid("inputs[0].data", "is nested too deeply")
    if len(flat) != math.prod(tensor.shape):
        raise invalid("inputs[0].data", f"has {len(flat)} values; the shape takes {math.prod(tensor.shape)}")
    try:
        return np.asarray(flat, np.float64)
    except OverflowError:
        raise invalid("inputs[0].data", "holds a number too large for a pixel") from None


def _outputs(request: InferRequest, known: Mapping[str, str]) -> dict[str, bool]:
    default = request.parameters.binary_data_output
    if not request.outputs:
        return dict.fromkeys(known, default)
    for number, output in enumerate(request.outputs):
        if output.name not in known:
            raise invalid(f"outputs[{number}].name", f"{output.name[:100]!r} is not one of {', '.join(known)}")
    return {
        output.name: default if output.parameters.binary_data is None else output.parameters.binary_data
        for output in request.outputs
    }
