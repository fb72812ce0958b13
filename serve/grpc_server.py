"""The Open Inference Protocol over gRPC, beside HTTP in every replica.

Each replica listens on the same port: the kernel spreads connections over those that do (SO_REUSEPORT). Ray's own gRPC
proxy would put a Python process before the replicas, and HAProxy a configuration that Ray does not write.

Calls are taken as streams of one message, which looks the same on the wire: so the token is looked at before the body
arrives, a body that does not arrive is given up, and no message is parsed by the framework on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from fedppd_ray import __version__
from fedppd_ray.errors import ConfigError
from serve.access import Gate
from serve.access_log import REQUEST_ID, AccessLog, current_request, sound_request_id
from serve.answers import Answer, Answerer, in_pieces
from serve.grpc_messages import SERVICE, message, parse
from serve.open_inference import EXTENSIONS, column_of, encode, metadata_of, require, statistics_of
from serve.refusals import RequestError, malformed
from serve.settings import Settings
from serve.tensors import ANY_OUTPUTS, WIDE, Wish
from serve.tracing import Tracing, stage

logger = logging.getLogger("fedppd.serve")

_GRACE_SECONDS = 20.0
_SHORT_BYTES = 4096  # of requests that only name a model
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

Reply = Callable[[Any, Any], Awaitable[Any]]


@asynccontextmanager
async def grpc_door(
    answerer: Answerer, gate: Gate, log: AccessLog | None, tracing: Tracing | None
) -> AsyncIterator[None]:
    """Open while the application lives, where the settings name a port."""
    settings = answerer.settings
    if settings.grpc_port is None:
        yield
        return
    import grpc  # here: most services have no gRPC port

    options = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_concurrent_streams", settings.max_pending),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.body_timeout_seconds)),
    ]
    server = grpc.aio.server(options=options)
    calls = _Calls(answerer, gate, log, tracing)
    handlers = {name: grpc.stream_unary_rpc_method_handler(calls.handler(name)) for name in calls.replies}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    _listen(server, settings)
    await server.start()
    try:
        yield
    finally:
        await server.stop(_GRACE_SECONDS)


def _listen(server: Any, settings: Settings) -> None:
    import grpc

    host = f"[{settings.grpc_host}]" if ":" in settings.grpc_host else settings.grpc_host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.grpc_certificate and settings.grpc_key:
            pair = (Path(settings.grpc_key).read_bytes(), Path(settings.grpc_certificate).read_bytes())
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"grpc_port {settings.grpc_port}: cannot listen on {address} ({error})") from None
    if bound != settings.grpc_port:
        raise ConfigError(f"grpc_port {settings.grpc_port}: cannot listen on {address}")


class _Calls:
    """What each method of the service answers; refusals, counting and the access log around it."""

    def __init__(self, answerer: Answerer, gate: Gate, log: AccessLog | None, tracing: Tracing | None) -> None:
        self._answerer, self._gate, self._log, self._tracing = answerer, gate, log, tracing
        self._predictor, self._metrics = answerer.predictor, answerer.predictor.metrics
        self.replies: dict[str, Reply] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "RepositoryIndex": self._index,
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
        }

    def handler(self, name: str) -> Callable[[Any, Any], Awaitable[bytes]]:
        reply = self.replies[name]

        async def answered(_messages: Any, context: Any) -> bytes:
            started, status = time.perf_counter(), 499  # the caller left before an answer
            given = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            call = _Call(given, _address(context.peer()))
            current_request.set(call.id)
            try:
                with self._traced(name, given):
                    answer: bytes = (await reply(call, context)).SerializeToString()
                status = 200
                return answer
            except RequestError as error:
                status = error.status
                await self._refuse(context, call, error)
                raise AssertionError("a refusal ends the call") from None
            except Exception:
                status = 500
                logger.exception("a gRPC call failed")
                await self._refuse(context, call, RequestError(500, "internal", "", "the service failed; it is logged"))
                raise
            finally:
                self._count(name, call, status, time.perf_counter() - started)

        return answered

    def _traced(self, name: str, given: dict[str, str]) -> AbstractContextManager[Any]:
        if self._tracing is None or not name.startswith("Model"):
            return nullcontext()
        return self._tracing.request(f"{SERVICE}/{name}", given)

    async def _refuse(self, context: Any, call: "_Call", error: RequestError) -> None:
        import grpc

        trailing = [(REQUEST_ID, call.id)]
        trailing += [("retry-after", value) for key, value in error.headers.items() if key == "Retry-After"]
        text = f"{error.field}: {error.message}" if error.field else error.message
        code = getattr(grpc.StatusCode, _CODES.get(error.status, "INTERNAL"))
        await context.abort(code, text, tuple(trailing))

    def _count(self, name: str, call: "_Call", status: int, seconds: float) -> None:
        route = f"/{SERVICE}/{name}"
        self._metrics.requests.inc(route, str(status))
        if name == "ModelInfer":
            self._metrics.request_seconds.observe(seconds)
        if self._log is not None:
            self._log.add(
                id=call.id,
                client=call.client,
                token=call.owner,
                method="gRPC",
                path=route,
                status=status,
                bytes=str(call.size) if call.size else None,
                milliseconds=round(1000 * seconds, 2),
            )

    async def _body(self, call: "_Call", context: Any, most: int) -> bytes:
        """The one message of the call, within the time that a body has."""
        import grpc

        seconds = self._answerer.settings.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await context.read()
        except TimeoutError:
            raise RequestError(408, "body_timeout", "request", f"did not arrive within {seconds:g} s") from None
        if body is grpc.aio.EOF:
            raise malformed("request", "holds no message")
        call.size = len(body)
        if len(body) > most:
            raise RequestError(413, "body_too_large", "request", f"is larger than the {most:,} bytes that are taken")
        return bytes(body)

    async def _named(self, kind: str, call: "_Call", context: Any) -> Any:
        try:
            return parse(kind, await self._body(call, context, _SHORT_BYTES))
        except ValueError as error:
            raise malformed("request", str(error)) from None

    async def _live(self, _call: "_Call", _context: Any) -> Any:
        return message("ServerLiveResponse", live=True)

    async def _ready(self, _call: "_Call", _context: Any) -> Any:
        return message("ServerReadyResponse", ready=True)

    async def _server(self, _call: "_Call", _context: Any) -> Any:
        return message("ServerMetadataResponse", name="fedppd", version=__version__, extensions=EXTENSIONS)

    async def _model_ready(self, call: "_Call", context: Any) -> Any:
        wanted = await self._named("ModelReadyRequest", call, context)
        require(self._predictor.current, wanted.name, wanted.version or None)
        return message("ModelReadyResponse", ready=True)

    async def _metadata(self, call: "_Call", context: Any) -> Any:
        wanted = await self._named("ModelMetadataRequest", call, context)
        known = metadata_of(require(self._predictor.current, wanted.name, wanted.version or None))
        tensors = {
            side: [
                message("TensorMetadata", name=one["name"], datatype=one["datatype"], shape=one["shape"])
                for one in known[side]
            ]
            for side in ("inputs", "outputs")
        }
        named = {key: known[key] for key in ("name", "versions", "platform")}
        return message("ModelMetadataResponse", **named, **tensors)

    async def _index(self, _call: "_Call", _context: Any) -> Any:
        student = self._predictor.current
        entry = message("ModelIndex", name=student.name, version=student.version, state="READY")
        return message("RepositoryIndexResponse", models=[entry])

    async def _statistics(self, call: "_Call", context: Any) -> Any:
        wanted = await self._named("ModelStatisticsRequest", call, context)
        student = self._predictor.current
        if wanted.name:
            require(student, wanted.name, wanted.version or None)
        known = statistics_of(student, self._metrics)
        durations = {key: message("StatisticDuration", **known["inference_stats"][key]) for key in ("success", "fail")}
        plain = ("name", "version", "last_inference", "inference_count", "execution_count")
        figures = {key: known[key] for key in plain}
        entry = message("ModelStatistics", **figures, inference_stats=message("InferStatistics", **durations))
        return message("ModelStatisticsResponse", model_stats=[entry])

    async def _infer(self, call: "_Call", context: Any) -> Any:
        call.owner = self._gate.admit(call.client, call.token)
        with self._answerer.admission.admit() as place:
            with stage("body"):
                body = await self._body(call, context, self._answerer.settings.max_body_bytes)
            place.hold(len(body))
            # Taken once: input and answer belong to this student, even if another is swapped in meanwhile.
            student = self._predictor.current
            with stage("decode"):
                wish, given = await self._answerer.grpc_tensors(body, student)
            return await _response(wish, await self._answerer.answer(student, given, wish.asked(student.card)))


class _Call:
    """Who calls, as its metadata and address say."""

    def __init__(self, metadata: dict[str, str], client: str) -> None:
        self.client = client
        self.id = sound_request_id(metadata.get(REQUEST_ID, "").encode() or None).decode()
        scheme, _, token = metadata.get("authorization", "").partition(" ")
        self.token = token.strip() if scheme.lower() == "bearer" else None
        self.owner: str | None = None
        self.size = 0


async def _response(wish: Wish, answer: Answer) -> Any:
    rows, classes = len(answer.predictions), len(answer.student.card["classes"])
    tensors: list[Any] = []
    contents: list[bytes] = []
    for name in wish.outputs:
        column = column_of(answer, name)
        width, shape = (classes, [rows, classes]) if name in WIDE else (1, [rows])
        pieces = [encode(ANY_OUTPUTS[name], column[piece]) async for piece in in_pieces(rows, width)]
        contents.append(b"".join(pieces))
        tensors.append(message("InferOutputTensor", name=name, datatype=ANY_OUTPUTS[name], shape=shape))
    hint = {"hint": message("InferParameter", string_param=answer.hint)} if answer.hint else {}
    return message(
        "ModelInferResponse",
        model_name=answer.student.name,
        model_version=answer.student.version,
        id=wish.id or "",
        parameters=hint,
        outputs=tensors,
        raw_output_contents=contents,
    )


def _address(peer: str) -> str:
    """`ipv4:10.0.0.7:1234` or `ipv6:%5B::1%5D:1234`, without its port."""
    host = peer.partition(":")[2].rpartition(":")[0]
    return host.replace("%5B", "").replace("%5D", "").strip("[]") or "unknown"
