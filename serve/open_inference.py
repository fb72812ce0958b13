"""The Open Inference Protocol v2 (REST), as KServe and Triton clients speak it, with binary tensors.

https://github.com/kserve/open-inference-protocol, and Triton's binary tensor data extension.
"""

import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from fedppd_ray import __version__
from serve.answers import Answer, Answerer, in_pieces, json_list
from serve.body import read_body
from serve.column_tensors import DATATYPES
from serve.inputs import JSON
from serve.metrics import Metrics
from serve.middleware import PREDICTION_ROUTES
from serve.openapi import Schemas
from serve.refusals import RequestError
from serve.student import ServedStudent
from serve.takes import ImageInput, TableInput, Takes
from serve.tensors import ANY_OUTPUTS, HEADER_LENGTH, INPUT, OUTPUTS, ROW_OUTPUTS, SET, WIDE, InferRequest, Wish
from serve.tracing import stage

EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics"]
_NUMPY = {"INT64": "<i8", "FP64": "<f8", "BOOL": "?"}


def add_routes(app: FastAPI, answerer: Answerer, protection: list[Any], schemas: Schemas) -> None:
    _add_health(app)
    predictor = answerer.predictor

    def chosen(name: str, version: str | None) -> ServedStudent:
        return require(predictor.current, name, version)

    @app.post("/v2/repository/index")
    async def index() -> Response:
        student = predictor.current
        return _json([{"name": student.name, "version": student.version, "state": "READY", "reason": ""}])

    @app.get("/v2/models/stats")
    @app.get("/v2/models/{name}/stats")
    @app.get("/v2/models/{name}/versions/{version}/stats")
    async def statistics(name: str | None = None, version: str | None = None) -> Response:
        student = predictor.current if name is None else chosen(name, version)
        return _json({"model_stats": [statistics_of(student, predictor.metrics)]})

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def metadata(name: str, version: str | None = None) -> Response:
        return _json(metadata_of(chosen(name, version)))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> Response:
        student = chosen(name, version)
        return _json({"name": student.name, "ready": True})

    schema = {"requestBody": {"required": True, "content": {JSON: {"schema": schemas.of(InferRequest)}}}}

    @app.post("/v2/models/{name}/infer", dependencies=protection, openapi_extra=schema)
    @app.post("/v2/models/{name}/versions/{version}/infer", dependencies=protection, openapi_extra=schema)
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        """Labels, probabilities, entropies and abstentions, as tensors."""
        with answerer.admission.admit() as place:
            with stage("body"):
                content = await read_body(request, place, answerer.settings)
            student = chosen(name, version)
            with stage("decode"):
                wish, given = await answerer.tensors(content, request.headers.get(HEADER_LENGTH), student)
            return await _answer(wish, await answerer.answer(student, given, wish.asked(student.card)))


def require(student: ServedStudent, name: str, version: str | None) -> ServedStudent:
    """The student, where it is the one that is asked for."""
    if name != student.name or version not in (None, student.version):
        message = f"only {student.name}, version {student.version}, is served here"
        raise RequestError(404, "unknown_model", "model", message)
    return student


def _add_health(app: FastAPI) -> None:
    @app.get("/v2")
    async def server() -> Response:
        return _json({"name": "fedppd", "version": __version__, "extensions": EXTENSIONS})

    @app.get("/v2/health/live")
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return _json({"ready": True})


def metadata_of(student: ServedStudent) -> dict[str, Any]:
    classes = len(student.card["classes"])
    sizes = {"probabilities": [-1, classes]}
    sets = [{"name": SET, "datatype": "BOOL", "shape": [-1, classes]}] if student.card.get("conformal") else []
    return {
        "name": student.name,
        "versions": [student.version],
        "platform": "fedppd_pytorch",
        "inputs": _inputs(student.takes),
        "outputs": [
            {"name": name, "datatype": datatype, "shape": sizes.get(name, [-1])}
            for name, datatype in (ROW_OUTPUTS if isinstance(student.takes, TableInput) else OUTPUTS).items()
        ]
        + sets,
    }


def _inputs(takes: Takes) -> list[dict[str, Any]]:
    """One tensor of images; of a table a tensor per column, whose parameters are what the card knows of it."""
    if isinstance(takes, ImageInput):
        return [{"name": INPUT, "datatype": "FP32", "shape": [-1, *takes.sides], "parameters": {"range": takes.range}}]
    return [
        {
            "name": column.name,
            "datatype": DATATYPES[column.kind],
            "shape": [-1],
            "parameters": column.model_dump(mode="json", include={"kind", "low", "high", "categories", "missing"}),
        }
        for column in takes.columns
    ]


def statistics_of(student: ServedStudent, metrics: Metrics) -> dict[str, Any]:
    """Triton's form, of what the replica that answers has done since it started, whatever the version was then."""
    passes, rows = metrics.batch_rows.totals()
    requests, seconds = metrics.request_seconds.totals()
    statuses = metrics.requests.totals(lambda labels: labels[0].endswith(PREDICTION_ROUTES))
    failed = int(sum(count for (_, status), count in statuses.items() if status != "200"))
    return {
        "name": student.name,
        "version": student.version,
        "last_inference": metrics.last_inference,
        "inference_count": int(rows),
        "execution_count": passes,
        "inference_stats": {
            "success": {"count": requests - failed, "ns": int(1e9 * seconds)},
            "fail": {"count": failed, "ns": 0},
        },
        "batch_stats": [],
    }


async def _answer(wish: Wish, answer: Answer) -> Response:
    rows, classes = len(answer.predictions), len(answer.student.card["classes"])
    tensors: list[bytes] = []
    trailer: list[bytes] = []
    for name, as_binary in wish.outputs.items():
        column = column_of(answer, name)
        table = name in WIDE
        width, shape = (classes, [rows, classes]) if table else (1, [rows])
        tensor: dict[str, Any] = {"name": name, "datatype": ANY_OUTPUTS[name], "shape": shape}
        if as_binary:
            content = b"".join([encode(ANY_OUTPUTS[name], column[piece]) async for piece in in_pieces(rows, width)])
            tensor["parameters"] = {"binary_data_size": len(content)}
            trailer.append(content)
            tensors.append(to_json(tensor))
        else:
            values = list(chain.from_iterable(column)) if table else column
            tensors.append(to_json(tensor)[:-1] + b',"data":' + await json_list(values, 1) + b"}")
    head: dict[str, Any] = {"model_name": answer.student.name, "model_version": answer.student.version}
    if wish.id is not None:
        head["id"] = wish.id
    if answer.hint:
        head["parameters"] = {"hint": answer.hint}
    text = to_json(head)[:-1] + b',"outputs":[' + b",".join(tensors) + b"]}"
    if not trailer:
        return Response(text, media_type=JSON)
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(b"".join([text, *trailer]), media_type="application/octet-stream", headers=headers)


def column_of(answer: Answer, name: str) -> list[Any]:
    column = [prediction[name] for prediction in answer.predictions]
    if name == SET:
        return [[label in names for label in answer.student.card["classes"]] for names in map(set, column)]
    return [";".join(names) for names in column] if name == "outside" else column


def encode(datatype: str, column: Iterable[Any]) -> bytes:
    if datatype == "BYTES":
        words = [str(word).encode() for word in column]
        return b"".join(struct.pack("<I", len(word)) + word for word in words)
    return np.asarray(column, _NUMPY[datatype]).tobytes()


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type=JSON)
