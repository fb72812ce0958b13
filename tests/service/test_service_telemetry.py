"""What operators see: metrics of all replicas, and traces."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families

from fedppd_ray.errors import ConfigError
from serve.tokens import token_digest
from serve.tracing import trace_endpoint
from tests.service.conftest import Client, png
from tests.service.live import free_port, wait_for

IMAGE = {"instances": [[[0] * 28] * 28]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def samples(text: str) -> dict[str, float]:
    """By name and labels; a text that Prometheus could not read fails here."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_those_of_all_replicas_together(open_client: Client, digits_run: Path, tmp_path: Path) -> None:
    first, second = (open_client(digits_run, metrics_folder=str(tmp_path)) for _ in range(2))
    for client, times in ((first, 3), (second, 4)):
        for _ in range(times):
            assert client.post("/predict", json=IMAGE).status_code == 200
    answered = "fedppd_requests_total[('route', '/predict'), ('status', '200')]"

    def totals(client: Any) -> tuple[float | None, ...]:
        found = samples(client.get("/metrics").text)
        names = (answered, "fedppd_request_seconds_count[]", "fedppd_request_seconds_bucket[('le', '+Inf')]")
        return (*(found.get(name) for name in names), found["fedppd_replicas[]"], found["fedppd_model_round[]"])

    wait_for(lambda: totals(first) == totals(second) == (7, 7, 7, 2, 1), 20, lambda: str(totals(first)))
    assert samples(first.get("/metrics/replica").text)[answered] == 3


def test_a_replica_that_is_gone_still_counts_and_is_no_longer_there(
    open_client: Client, digits_run: Path, tmp_path: Path
) -> None:
    first, second = (open_client(digits_run, metrics_folder=str(tmp_path)) for _ in range(2))
    second.post("/predict", json=IMAGE)
    answered = "fedppd_requests_total[('route', '/predict'), ('status', '200')]"
    wait_for(lambda: samples(first.get("/metrics").text).get(answered) == 1, 20)
    second.__exit__()
    for file in tmp_path.glob("*.json"):
        os.utime(file, (time.time() - 60,) * 2)
    found = samples(first.get("/metrics").text)
    assert (found[answered], found["fedppd_replicas[]"]) == (1, 1)


@pytest.mark.parametrize("content", ["", "{", "\x00"])
def test_a_broken_file_of_metrics_is_left_out(
    open_client: Client, digits_run: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    client = open_client(digits_run, metrics_folder=str(tmp_path))
    assert samples(client.get("/metrics").text)["fedppd_replicas[]"] == 1


class Collector:
    """Takes OTLP over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resources: list[Any] = []
        self.headers: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for group in content["resourceSpans"]:
                    outer.resources.append(group["resource"])
                    for scope in group["scopeSpans"]:
                        outer.spans += scope["spans"]
                outer.headers.append((self.path, self.headers["X-Key"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def test_a_request_is_a_span_with_its_stages_below_the_callers(
    open_client: Client, digits_run: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ward-3")
    client = open_client(digits_run, otlp_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "abc", "Content-Type": "image/png"}
    assert client.post("/predict", content=png(np.eye(28)), headers=headers).status_code == 200
    assert client.post("/predict", content=b"x", headers={"Content-Type": "image/png"}).status_code == 400
    client.get("/healthz")
    client.__exit__()  # sends what waits
    first = [span for span in collector.spans if span["traceId"] == TRACE]
    (root,) = [span for span in first if span["kind"] == 2]
    assert (root["name"], root["parentSpanId"]) == ("POST /predict", PARENT)
    known = attributes(root)
    assert (known["fedppd.request_id"], known["http.response.status_code"]) == ("abc", "200")
    stages = [span["name"] for span in first if span.get("parentSpanId") == root["spanId"]]
    assert stages == ["body", "decode", "forward"]
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in first)
    roots = [attributes(span)["http.response.status_code"] for span in collector.spans if span["kind"] == 2]
    assert roots == ["200", "400"], "health checks are not traced"
    assert set(collector.headers) == {("/v1/traces", "a secret")}
    assert {"key": "service.name", "value": {"stringValue": "ward-3"}} in collector.resources[0]["attributes"]


def test_grpc_calls_are_traced_too(open_client: Client, digits_run: Path, collector: Collector) -> None:
    port = free_port()
    http = open_client(digits_run, otlp_endpoint=collector.url, grpc_port=port, tokens={"ward": token_digest("right")})
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("image", [1, 28, 28], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 28, 28), np.uint8))
    headers = {"authorization": "Bearer right", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    client.infer("digits", [tensor], headers=headers)
    client.close()
    http.__exit__()
    names = [span["name"] for span in collector.spans if span["traceId"] == TRACE]
    assert names == ["body", "decode", "forward", "inference.GRPCInferenceService/ModelInfer"]


def test_a_collector_that_is_gone_costs_no_request(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    assert client.post("/predict", json=IMAGE).status_code == 200


def test_where_traces_go() -> None:
    assert trace_endpoint("http://collector:4318") == "http://collector:4318/v1/traces"
    assert trace_endpoint("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        trace_endpoint("collector:4317")
