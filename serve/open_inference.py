"""The Open Inference Protocol v2 (REST), as KServe and Triton clients speak it, with binary tensors.

https://github.com/kserve/open-inference-protocol, and Triton's binary tensor data extension.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json, to_json

from fedppd_ray import __version__
from fedppd_ray.prediction import Pixels
from serve.answers import Answer, Answerer
from serve.body import read_body
from serve.errors import RequestError, invalid, malformed
from serve.inputs import JSON, Shape, check_count, check_range
from serve.student import ServedStudent

INPUT = "image"
_OUTPUTS = {
    "label": "INT64",
    "class_name": "BYTES",
    "probabilities": "FP64",
    "entropy": "FP64",
    "normalized_entropy": "FP64",
    "abstain": "BOOL",
}
_NUMPY = {"INT64": "<i8", "FP64": "<f8", "BOOL": "?"}
_INPUT_TYPES = {
    "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
    "UINT64": "<u8", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_HEADER_LENGTH = "Inference-Header-Content-Length"
_MOST_DIMENSIONS = 4


class _Loose(BaseModel):
    """Clients send parameters of their own; what is not known here is left alone, as the protocol asks."""

    model_config = ConfigDict(extra="allow")


class InputParameters(_Loose):
    binary_data_size: StrictInt | None = Field(None, ge=0)


class OutputParameters(_Loose):
    binary_data: StrictBool | None = None


class RequestParameters(_Loose):
    binary_data_output: StrictBool = False
    coverage: float | None = Field(None, gt=0, le=1, strict=True, allow_inf_nan=False)


class InputTensor(_Loose):
    name: StrictStr
    shape: list[StrictInt] = Field(max_length=_MOST_DIMENSIONS)
    datatype: StrictStr
    data: list[Any] | None = None
    parameters: InputParameters = InputParameters()


class OutputRequest(_Loose):
    name: StrictStr
    parameters: OutputParameters = OutputParameters()


class InferRequest(_Loose):
    id: StrictStr | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=1)
    outputs: list[OutputRequest] | None = Field(None, max_length=len(_OUTPUTS))
    parameters: RequestParameters = RequestParameters()


@dataclass(frozen=True)
class _Body:
    request: InferRequest
    binary: memoryview


def add_routes(app: FastAPI, answerer: Answerer, protection: list[Any]) -> None:
    _add_health(app)
    predictor = answerer.predictor

    def chosen(name: str, version: str | None) -> ServedStudent:
        student = predictor.current
        if name != student.name or version not in (None, student.version):
            raise RequestError(
                404, "unknown_model", "model", f"only {student.name}, version {student.version}, is served here"
            )
        return student

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def metadata(name: str, version: str | None = None) -> Response:
        return _json(_metadata(chosen(name, version)))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> Response:
        student = chosen(name, version)
        return _json({"name": student.name, "ready": True})

    schema = {"requestBody": {"required": True, "content": {JSON: {"schema": InferRequest.model_json_schema()}}}}

    @app.post("/v2/models/{name}/infer", dependencies=protection, openapi_extra=schema)
    @app.post("/v2/models/{name}/versions/{version}/infer", dependencies=protection, openapi_extra=schema)
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        """Labels, probabilities, entropies and abstentions, as tensors."""
        with answerer.admission.admit() as place:
            content = await read_body(request, place, answerer.settings)
            student = chosen(name, version)
            body = _parse(content, request.headers.get(_HEADER_LENGTH))
            pixels = _pixels(body, student.shape, answerer.settings.max_images)
            wanted = _wanted(body.request)
            answer = await answerer.answer(student, pixels, body.request.parameters.coverage)
            return _answer(body.request, answer, wanted)


def _add_health(app: FastAPI) -> None:
    @app.get("/v2")
    async def server() -> Response:
        return _json({"name": "fedppd", "version": __version__, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live")
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return _json({"ready": True})


def _metadata(student: ServedStudent) -> dict[str, Any]:
    sizes = {"probabilities": [-1, len(student.card["classes"])]}
    return {
        "name": student.name,
        "versions": [student.version],
        "platform": "fedppd_pytorch",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *_sides(student.shape)]}],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": sizes.get(name, [-1])} for name, datatype in _OUTPUTS.items()
        ],
    }


def _sides(shape: Shape) -> tuple[int, ...]:
    channels, height, width = shape
    return (height, width) if channels == 1 else (height, width, channels)


def _parse(content: bytes, header_length: str | None) -> _Body:
    """The JSON part, and the bytes behind it where the header says how long the JSON is."""
    length = len(content)
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length) > length:
            raise malformed(_HEADER_LENGTH, f"{header_length[:40]!r} is not a length within the body")
        length = int(header_length)
    try:
        parsed = from_json(content[:length], allow_inf_nan=False)
    except ValueError as error:
        raise malformed("body", f"is not JSON: {error}") from None
    try:
        request = InferRequest.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise invalid(".".join(map(str, first["loc"])) or "body", first["msg"]) from None
    return _Body(request, memoryview(content)[length:])


def _pixels(body: _Body, shape: Shape, max_images: int) -> Pixels:
    tensor = body.request.inputs[0]
    if tensor.name != INPUT:
        raise invalid("inputs[0].name", f"{tensor.name[:100]!r} is unknown; the input is called {INPUT!r}")
    if tensor.datatype not in _INPUT_TYPES:
        raise invalid("inputs[0].datatype", f"{tensor.datatype[:100]!r} is not one of {', '.join(_INPUT_TYPES)}")
    sides = _sides(shape)
    if tuple(tensor.shape[1:]) != sides or not tensor.shape:
        raise invalid("inputs[0].shape", f"{tensor.shape} is not [N, {', '.join(map(str, sides))}]")
    check_count("inputs[0].shape", tensor.shape[0], max_images)
    values = _binary(tensor, body.binary) if tensor.parameters.binary_data_size is not None else _listed(tensor)
    check_range("inputs[0].data", values)
    array = values.reshape(tensor.shape)
    rows: NDArray[Any] = array[:, None] if shape[0] == 1 else array.transpose(0, 3, 1, 2)
    return rows if rows.dtype == np.uint8 else rows.astype(np.float32)


def _binary(tensor: InputTensor, binary: memoryview) -> NDArray[Any]:
    dtype = np.dtype(_INPUT_TYPES[tensor.datatype])
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


def _wanted(request: InferRequest) -> dict[str, bool]:
    """Names of the outputs to send, and whether as binary."""
    default = request.parameters.binary_data_output
    if not request.outputs:
        return dict.fromkeys(_OUTPUTS, default)
    for number, output in enumerate(request.outputs):
        if output.name not in _OUTPUTS:
            raise invalid(f"outputs[{number}].name", f"{output.name[:100]!r} is not one of {', '.join(_OUTPUTS)}")
    return {
        output.name: default if output.parameters.binary_data is None else output.parameters.binary_data
        for output in request.outputs
    }


def _answer(request: InferRequest, answer: Answer, wanted: dict[str, bool]) -> Response:
    rows, classes = len(answer.predictions), len(answer.student.card["classes"])
    tensors: list[dict[str, Any]] = []
    trailer: list[bytes] = []
    for name, as_binary in wanted.items():
        column = [prediction[name] for prediction in answer.predictions]
        shape = [rows, classes] if name == "probabilities" else [rows]
        tensor: dict[str, Any] = {"name": name, "datatype": _OUTPUTS[name], "shape": shape}
        if as_binary:
            content = _encode(_OUTPUTS[name], column)
            tensor["parameters"] = {"binary_data_size": len(content)}
            trailer.append(content)
        else:
            tensor["data"] = list(chain.from_iterable(column)) if name == "probabilities" else column
        tensors.append(tensor)
    student = answer.student
    head: dict[str, Any] = {"model_name": student.name, "model_version": student.version, "outputs": tensors}
    if request.id is not None:
        head["id"] = request.id
    if not trailer:
        return _json(head)
    text = to_json(head)
    headers = {_HEADER_LENGTH: str(len(text))}
    return Response(b"".join([text, *trailer]), media_type="application/octet-stream", headers=headers)


def _encode(datatype: str, column: Iterable[Any]) -> bytes:
    if datatype == "BYTES":
        words = [str(word).encode() for word in column]
        return b"".join(struct.pack("<I", len(word)) + word for word in words)
    return np.asarray(column, _NUMPY[datatype]).tobytes()


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type=JSON)
