"""Plain ASGI layers around the application: no copy of the body, no task of their own."""

import time

from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import Metrics

_PREDICTION_ROUTES = ("/predict", "/infer")


class RequestMetrics:
    """Counts requests and times predictions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # the caller left before an answer began

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            # The route's pattern, not the path: callers must not be able to make new time series.
            route = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.requests.inc(route, str(status))
            if route.endswith(_PREDICTION_ROUTES):
                self._metrics.request_seconds.observe(time.perf_counter() - started)


class ReadableHeaders:
    """Answers 400 to header values that are not UTF-8. Ray decodes some before it asks the application, and fails."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if not value.isascii():
                    try:
                        value.decode()
                    except UnicodeDecodeError:
                        await _refuse(name.decode("latin-1"), send)
                        return
        await self._app(scope, receive, send)


async def _refuse(header: str, send: Send) -> None:
    problem = {"code": "malformed", "field": header, "message": "the header's value is not UTF-8"}
    body = to_json({"error": problem})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def proxy_middlewares() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: Ray puts them around its own handling of a request."""
    return [Middleware(ReadableHeaders)]
