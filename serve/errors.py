"""Refusals that a caller sees: a status, the field that is wrong, and what to do."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

logger = logging.getLogger("fedppd.serve")


class RequestError(Exception):
    """Answered as JSON with this status; `field` names the part of the request that is to be mended."""

    def __init__(
        self, status: int, code: str, field: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, code, field, message, headers)
        self.status = status
        self.code = code
        self.field = field
        self.message = message
        self.headers = dict(headers or {})


def invalid(field: str, message: str) -> RequestError:
    """422: well-formed, but not what the model takes."""
    return RequestError(422, "invalid_input", field, message)


def malformed(field: str, message: str) -> RequestError:
    """400: cannot be parsed at all."""
    return RequestError(400, "malformed", field, message)


def add_error_handlers(app: FastAPI) -> None:
    """Whatever goes wrong, wherever, is answered as JSON of one form."""

    @app.exception_handler(RequestError)
    async def on_refusal(request: Request, error: RequestError) -> Response:
        return _refused(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refused(request, invalid(".".join(str(part) for part in first["loc"][1:]), first["msg"]))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return _refused(request, RequestError(error.status_code, "http_error", "path", error.detail, error.headers))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        logger.error("a request failed: %s %s", request.method, request.url.path, exc_info=error)
        message = "this is a fault of the service; it has been logged"
        return _refused(request, RequestError(500, "internal", "", message))


def _refused(request: Request, error: RequestError) -> Response:
    content: Any = {"error": {"code": error.code, "field": error.field, "message": error.message}}
    if request.url.path.startswith("/v2"):
        # The Open Inference Protocol has one string for an error.
        content = {"error": f"{error.field}: {error.message}" if error.field else error.message}
    return Response(to_json(content), error.status, headers=error.headers, media_type="application/json")
