"""The HTTP interface around a predictor. Knows nothing of Ray: any ASGI server runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from pydantic_core import to_json

from fedppd_ray import __version__
from serve import inputs, open_inference
from serve.access import Gate, guard
from serve.access_log import AccessLog
from serve.aggregate import WRITE_SECONDS, AllReplicas
from serve.answers import Answerer, json_list, unsupported
from serve.drift import STEP_SECONDS, Drift
from serve.errors import add_error_handlers
from serve.grpc_server import grpc_door
from serve.metrics import Metrics
from serve.middleware import Lingering, Observed
from serve.openapi import Schemas
from serve.predictor import Predictor
from serve.schemas import (
    DriftResponse,
    ErrorResponse,
    Health,
    ModelResponse,
    PredictRequest,
    PredictResponse,
    PredictRowsRequest,
)
from serve.settings import Settings
from serve.tokens import Tokens
from serve.tracing import Traced, Tracing
from serve.watcher import Watcher

_STATIC = Path(__file__).parent / "static"
_PROMETHEUS = "text/plain; version=0.0.4"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
# Nothing from elsewhere, no inline script: the page shows what people upload.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The body cannot be parsed.",
        408: "The body did not arrive in time.",
        413: "The body, or the image in it, is too large.",
        415: "An unknown content type or encoding.",
        422: "The input does not fit the model.",
        429: "Too many requests, or wrong tokens, from this address: try again after Retry-After seconds.",
        503: "Overloaded: try again after Retry-After seconds.",
        504: "The prediction took too long.",
    }.items()
}
_UNAUTHORISED: dict[int | str, dict[str, Any]] = {401: {"model": ErrorResponse, "description": "No valid token."}}


def create_app(predictor: Predictor, settings: Settings) -> FastAPI:
    metrics = predictor.metrics
    answerer = Answerer(predictor, settings, metrics)
    tokens = Tokens(settings.tokens, settings.token_file)
    gate = Gate(tokens, settings, metrics)
    replicas = AllReplicas(metrics, settings.metrics_folder) if settings.metrics_folder else None
    tracing = Tracing(settings.otlp_endpoint) if settings.otlp_endpoint else None
    log = AccessLog(settings.access_log) if settings.access_log else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        watchers = [Watcher(predictor.refresh, settings.poll_seconds)] if predictor.watching else []
        watchers += [Watcher(tokens.refresh, settings.poll_seconds)] if settings.token_file else []
        watchers += [Watcher(replicas.write, WRITE_SECONDS)] if replicas else []
        watchers.append(Watcher(answerer.drift.step, STEP_SECONDS, answerer.drift.begin))
        if (trial := predictor.trial) is not None:
            trial.start()
            watchers.append(Watcher(trial.refresh, settings.poll_seconds))
        for watcher in watchers:
            watcher.start()
        answerer.start()
        async with grpc_door(answerer, gate, log, tracing):
            yield
        for watcher in watchers:
            watcher.stop()
        if trial is not None:
            trial.stop()
        if log is not None:
            log.close()
        if tracing is not None:
            tracing.close()
        await answerer.close()
        predictor.close()

    # FastAPI's own documentation page loads its scripts from a CDN; this one brings them along.
    app = FastAPIOffline(
        title="FedPPD student",
        version=__version__,
        summary="Predictions that know when to abstain.",
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Lingering, most_bytes=settings.max_linger_bytes, seconds=settings.body_timeout_seconds)
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing)
    app.add_middleware(Observed, metrics=metrics, log=log, client_header=settings.client_header)
    add_error_handlers(app)
    app.state.tokens = tokens
    guarded = tokens or settings.client_requests_a_second
    protection = [Depends(guard(gate))] if guarded else []
    schemas = Schemas()
    _add_prediction(app, answerer, protection, schemas)
    _add_information(app, predictor, answerer.drift)
    _add_metrics(app, metrics, replicas)
    open_inference.add_routes(app, answerer, protection, schemas)
    schemas.publish(app)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


def _add_prediction(app: FastAPI, answerer: Answerer, protection: list[Any], schemas: Schemas) -> None:
    content: dict[str, Any] = {
        inputs.JSON: {"schema": {"anyOf": [schemas.of(PredictRequest), schemas.of(PredictRowsRequest)]}},
        **dict.fromkeys((*inputs.IMAGES, inputs.NPY), _BINARY),
        inputs.CSV: {"schema": {"type": "string"}},
    }

    @app.post(
        "/predict",
        dependencies=protection,
        response_model=PredictResponse,
        responses=_REFUSALS | (_UNAUTHORISED if protection else {}),
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def predict(
        request: Request,
        coverage: Annotated[
            float | None, Query(gt=0, le=1, allow_inf_nan=False, description="As in a JSON body, for any body.")
        ] = None,
        confidence: Annotated[
            float | None, Query(gt=0, lt=1, allow_inf_nan=False, description="As in a JSON body, for any body.")
        ] = None,
    ) -> Response:
        """Label, probabilities, entropy and "I don't know" for images, or rows of a table, by one forward pass."""
        answer = await answerer.predict(request, _media_type(request), inputs.Asked(coverage, confidence))
        head: dict[str, Any] = {"model": answer.student.reference, "abstention": answer.level}
        if answer.sets:
            head["conformal"] = answer.sets
        if answer.hint:
            head["hint"] = answer.hint
        predictions = await json_list(answer.predictions, len(answer.student.card["classes"]))
        return Response(to_json(head)[:-1] + b',"predictions":' + predictions + b"}", media_type=inputs.JSON)


def _media_type(request: Request) -> str:
    given = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if given not in inputs.MEDIA_TYPES:
        raise unsupported(given, inputs.MEDIA_TYPES)
    return given


def _add_information(app: FastAPI, predictor: Predictor, drift: Drift) -> None:
    page = (_STATIC / "index.html").read_bytes()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/model", response_model=ModelResponse)
    async def model() -> Response:
        """The model card: classes, input, metrics, abstention, configuration hash, and the state of reloading."""
        return _json(predictor.describe())

    @app.get("/drift", response_model=DriftResponse)
    async def drifting() -> Response:
        """Whether what this replica is asked still looks like the calibration rows, and how the last window did."""
        return _json(drift.describe(predictor.current))

    @app.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @app.get("/readyz", response_model=Health)
    async def readyz() -> Response:
        """A student is loaded: predictions are answered."""
        return _json({"status": "ready", "version": predictor.current.version})


def _add_metrics(app: FastAPI, metrics: Metrics, replicas: AllReplicas | None) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def everywhere() -> Response:
        """Prometheus metrics of all replicas, where they have a folder in common; else of this one."""
        text = await asyncio.to_thread(replicas.text) if replicas else metrics.text()
        return Response(text, media_type=_PROMETHEUS)

    @app.get("/metrics/replica", include_in_schema=False)
    async def here() -> Response:
        """Prometheus metrics of the replica that answers."""
        return Response(metrics.text(), media_type=_PROMETHEUS)


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type=inputs.JSON)
