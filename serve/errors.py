"""Refusals as answers."""

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from serve.access_log import REQUEST_ID, current_request
from serve.refusals import RequestError, invalid

logger = logging.getLogger("fedppd.serve")


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
        headers = {REQUEST_ID: current_request.get()}
        return _refused(request, RequestError(500, "internal", "", message, headers))


def _refused(request: Request, error: RequestError) -> Response:
    content: Any = {"error": {"code": error.code, "field": error.field, "message": error.message}}
    if request.url.path.startswith("/v2"):
        # The Open Inference Protocol has one string for an error.
        content = {"error": f"{error.field}: {error.message}" if error.field else error.message}
    return Response(to_json(content), error.status, headers=error.headers, media_type="application/json")
