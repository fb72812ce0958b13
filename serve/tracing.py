"""OpenTelemetry traces: a span for each request, and for its stages. By the extra `otel`, and only where asked for.

Spans go to a collector by OTLP over HTTP as JSON. OpenTelemetry's own exporter pins one release of its siblings and of
protobuf, which is Ray's to choose; the SDK, which Ray brings along anyway, leaves that choice alone. It honours the
usual variables: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*,
OTEL_EXPORTER_OTLP_HEADERS.
"""

import json
import logging
import os
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedppd_ray import __version__
from fedppd_ray.errors import ConfigError
from serve.access_log import current_request

logger = logging.getLogger("fedppd.serve")

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_PATH = "/v1/traces"
_SECONDS = 10.0
# Asked every few seconds by machines, and nobody's request.
_UNTRACED = frozenset(("/healthz", "/readyz", "/metrics", "/metrics/replica", "/v2/health/live", "/v2/health/ready"))
_CARRIED = (b"traceparent", b"tracestate")
_NOTHING = nullcontext()

_tracer: ContextVar[Any] = ContextVar("tracer", default=None)


def stage(name: str) -> AbstractContextManager[Any]:
    """A span within the request's own; nothing where the request is not traced."""
    tracer = _tracer.get()
    return tracer.start_as_current_span(name) if tracer is not None else _NOTHING


class Tracing:
    """Makes the spans of one replica, and sends them in batches from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError("traces need OpenTelemetry; pip install 'fedppd-ray[otel]'") from None
        name = os.environ.get("OTEL_SERVICE_NAME", "fedppd")
        # Neither the process's global provider nor its exit: a replica closes this by itself.
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("fedppd.serve", __version__)

    @contextmanager
    def request(self, name: str, carried: Mapping[str, str]) -> Iterator[Any]:
        """The span of a request, a child of the caller's where it carries W3C's traceparent."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(carried))
        token = _tracer.set(self._tracer)
        try:
            with self._tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER) as span:
                span.set_attribute("fedppd.request_id", current_request.get())
                yield span
        finally:
            _tracer.reset(token)

    def close(self) -> None:
        self._provider.shutdown()


def finish(span: Any, name: str, attributes: Mapping[str, Any], failed: bool) -> None:
    """What is known of a request only when it has been answered."""
    from opentelemetry.trace import StatusCode

    span.update_name(name)
    span.set_attributes(dict(attributes))
    if failed:
        span.set_status(StatusCode.ERROR)


class Traced:
    """An ASGI layer."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        carried = {name.decode(): headers[name].decode("latin-1") for name in _CARRIED if name in headers}
        status = 499

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracing.request(scope["method"], carried) as span:
            try:
                await self._app(scope, receive, watched)
            except Exception:
                status = 500
                raise
            finally:
                route = str(getattr(scope.get("route"), "path", "other"))
                known = {
                    "http.request.method": scope["method"],
                    "http.route": route,
                    "http.response.status_code": status,
                }
                finish(span, f"{scope['method']} {route}", known, status >= 500)


def trace_endpoint(url: str) -> str:
    """`http://collector:4318` is where its API is; a path that is given is taken as it is."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint {url}: is not an http:// or https:// URL")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}{_PATH}"


def _exporter(url: str) -> Any:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    endpoint = trace_endpoint(url)
    pairs = [pair.split("=", 1) for pair in os.environ.get(HEADERS_VARIABLE, "").split(",") if "=" in pair]
    headers = {name.strip(): urllib.parse.unquote(value.strip()) for name, value in pairs}

    class OtlpJson(SpanExporter):
        def export(self, spans: Sequence[Any]) -> Any:
            body = json.dumps(_payload(spans)).encode()
            request = urllib.request.Request(endpoint, body, headers | {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=_SECONDS):
                    return SpanExportResult.SUCCESS
            except OSError as error:
                logger.warning("%d spans are lost: %s (%s)", len(spans), endpoint, error)
                return SpanExportResult.FAILURE

    return OtlpJson()


def _payload(spans: Sequence[Any]) -> dict[str, Any]:
    """All spans of a batch come from one provider and one tracer."""
    scope = spans[0].instrumentation_scope
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(spans[0].resource.attributes)},
                "scopeSpans": [
                    {"scope": {"name": scope.name, "version": scope.version}, "spans": [_span(span) for span in spans]}
                ],
            }
        ]
    }


def _span(span: Any) -> dict[str, Any]:
    described = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP counts from "unspecified"
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        described["parentSpanId"] = f"{span.parent.span_id:016x}"
    return described


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    def one(value: Any) -> dict[str, Any]:
        if isinstance(value, bool):
            return {"boolValue": value}
        if isinstance(value, int):
            return {"intValue": str(value)}
        return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}

    return [{"key": key, "value": one(value)} for key, value in values.items()]
