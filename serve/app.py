"""The HTTP interface around a predictor. Knows nothing of Ray: any ASGI server runs it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from pydantic_core import to_json

from fedppd_ray import __version__
from serve import inputs, open_inference
from serve.answers import Answerer
from serve.errors import RequestError, add_error_handlers
from serve.middleware import RequestMetrics
from serve.predictor import Predictor
from serve.schemas import ErrorResponse, Health, ModelResponse, PredictRequest, PredictResponse
from serve.settings import Settings, token_fits
from serve.watcher import Watcher

_STATIC = Path(__file__).parent / "static"
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
        503: "Overloaded: try again after Retry-After seconds.",
        504: "The prediction took too long.",
    }.items()
}
_UNAUTHORISED: dict[int | str, dict[str, Any]] = {401: {"model": ErrorResponse, "description": "No valid token."}}

Guard = Callable[..., Awaitable[None]]


def create_app(predictor: Predictor, settings: Settings) -> FastAPI:
    metrics = predictor.metrics
    answerer = Answerer(predictor, settings, metrics)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        watcher = Watcher(predictor.refresh, settings.poll_seconds)
        if settings.watch:
            watcher.start()
        yield
        watcher.stop()
        predictor.close()

    # FastAPI's own documentation page loads its scripts from a CDN; this one brings them along.
    app = FastAPIOffline(
        title="FedPPD student",
        version=__version__,
        summary="Predictions that know when to abstain.",
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(RequestMetrics, metrics=metrics)
    add_error_handlers(app)
    protection = [Depends(_guard(settings.token_sha256))] if settings.token_sha256 else []
    _add_prediction(app, answerer, protection)
    _add_information(app, predictor)
    open_inference.add_routes(app, answerer, protection)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


def _add_prediction(app: FastAPI, answerer: Answerer, protection: list[Any]) -> None:
    content = {
        inputs.JSON: {"schema": PredictRequest.model_json_schema()},
        **dict.fromkeys((inputs.PNG, inputs.JPEG, inputs.NPY), _BINARY),
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
    ) -> Response:
        """Label, probabilities, entropy and "I don't know" for images, by one forward pass."""
        answer = await answerer.predict(request, _media_type(request), coverage)
        return _json({"model": answer.student.reference, "abstention": answer.level, "predictions": answer.predictions})


def _media_type(request: Request) -> str:
    given = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if given not in inputs.MEDIA_TYPES:
        raise RequestError(
            415,
            "unsupported_media_type",
            "Content-Type",
            f"{given[:100]!r} is not taken; send one of {', '.join(inputs.MEDIA_TYPES)}",
        )
    return given


def _add_information(app: FastAPI, predictor: Predictor) -> None:
    page = (_STATIC / "index.html").read_bytes()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/model", response_model=ModelResponse)
    async def model() -> Response:
        """The model card: classes, input, metrics, abstention, configuration hash, and the state of reloading."""
        return _json(predictor.describe())

    @app.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @app.get("/readyz", response_model=Health)
    async def readyz() -> Response:
        """A student is loaded: predictions are answered."""
        return _json({"status": "ready", "version": predictor.current.version})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Prometheus metrics of the replica that answers."""
        return Response(predictor.metrics.text(), media_type="text/plain; version=0.0.4")


def _guard(digest: str) -> Guard:
    scheme = HTTPBearer(auto_error=False)

    async def authorise(given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        if given is None or not token_fits(given.credentials, digest):
            raise RequestError(
                401,
                "unauthorised",
                "Authorization",
                "send the service's token as `Authorization: Bearer …`",
                {"WWW-Authenticate": "Bearer"},
            )

    return authorise


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type=inputs.JSON)
