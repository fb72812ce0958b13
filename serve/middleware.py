"""Plain ASGI layers around the application: no copy of the body, no task of their own."""

import asyncio
import contextlib
import time

from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.access_log import REQUEST_ID, AccessLog, current_request, sound_request_id
from serve.metrics import Metrics

# What these layers note in a request's scope.
CLIENT, OWNER = "fedppd.client", "fedppd.token"
_REQUEST_ID = REQUEST_ID.encode()
PREDICTION_ROUTES = ("/predict", "/infer", "/ModelInfer")
_LONGEST_PATH = 200


class Observed:
    """Gives every request an id, counts it, times predictions, and writes the access log."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: AccessLog | None, client_header: str | None) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._client_header = client_header.encode() if client_header else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # the caller left before an answer began
        given = dict(scope["headers"])
        request = sound_request_id(given.get(_REQUEST_ID))
        # Its task is this request's alone: the value ends with it.
        current_request.set(request.decode())
        scope[CLIENT] = self._client(scope, given)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, request)]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:  # a fault of ours: the layer around this one answers 500
            status = 500 if status == 499 else status
            raise
        finally:
            # The route's pattern, not the path: callers must not be able to make new time series.
            route = str(getattr(scope.get("route"), "path", "other"))
            seconds = time.perf_counter() - started
            self._metrics.requests.inc(route, str(status))
            if route.endswith(PREDICTION_ROUTES):
                self._metrics.request_seconds.observe(seconds)
            if self._log is not None:
                self._log.add(
                    id=request.decode(),
                    client=scope[CLIENT],
                    token=scope.get(OWNER),
                    method=scope["method"],
                    path=scope["path"][:_LONGEST_PATH],
                    status=status,
                    bytes=given.get(b"content-length", b"").decode("latin-1")[:20] or None,
                    milliseconds=round(1000 * seconds, 2),
                )

    def _client(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        if self._client_header is not None and self._client_header in headers:
            return headers[self._client_header].decode("latin-1")[:64]
        return str(scope["client"][0]) if scope.get("client") else "unknown"


class Lingering:
    """Takes the rest of a body before the answer that refuses it, within bounds.

    Many clients send all of a body before they look for an answer: if the connection closed while they send, they
    would see a broken pipe, and never read why.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, seconds: float) -> None:
        self._app = app
        self._most = most_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        announced = headers.get(b"content-length", b"" if b"transfer-encoding" in headers else b"0")
        # Who asks first whether to send ("Expect") has sent nothing. Who announces too much is not worth waiting for.
        if announced == b"0" or b"expect" in headers or (announced.isdigit() and _above(announced, self._most)):
            await self._app(scope, receive, send)
            return
        ends = time.monotonic() + self._seconds
        complete = False

        async def noted() -> Message:
            nonlocal complete
            message = await receive()
            complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def after_the_rest(message: Message) -> None:
            if message["type"] == "http.response.start" and not complete:
                taken = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ends - time.monotonic()):
                        while not complete and taken <= self._most:
                            taken += len((await noted()).get("body", b""))
            await send(message)

        await self._app(scope, noted, after_the_rest)


def _above(number: bytes, limit: int) -> bool:
    return len(number) > 18 or int(number) > limit


class ReadableHeaders:
    """Answers 400 to header values that are not UTF-8. Ray decodes some before it asks the application, and fails.

    Ray also repeats any request id there is, beside the application's own: it gets to see a sound one, and one is sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower(): value for name, value in message["headers"]}
                others = [pair for pair in message["headers"] if pair[0].lower() != _REQUEST_ID]
                message["headers"] = [*others, (_REQUEST_ID, named.get(_REQUEST_ID, b"-"))]
            await send(message)

        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if not value.isascii():
                    try:
                        value.decode()
                    except UnicodeDecodeError:
                        await _refuse(name.decode("latin-1"), send)
                        return
            sound = sound_request_id(dict(scope["headers"]).get(_REQUEST_ID))
            others = [pair for pair in scope["headers"] if pair[0] != _REQUEST_ID]
            scope = {**scope, "headers": [*others, (_REQUEST_ID, sound)]}
        await self._app(scope, receive, with_one_id)


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
