"""`fedppd serve` itself: real Ray Serve behind its real proxy, over loopback."""

import asyncio
import json
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedppd_ray.inference.temperature import scaled
from fedppd_ray.runs.run import evaluate_run
from tests.service.conftest import npy, png
from tests.service.exports import export_again
from tests.service.live import HEADERS, TOKEN, Server, fedppd_serve, keep_busy, wait_for

JSON, PNG, JPEG, NPY = "application/json", "image/png", "image/jpeg", "application/x-npy"
ZEROS = np.zeros((28, 28)).tolist()
BODY = json.dumps({"instances": [ZEROS]}).encode()


@pytest.fixture(scope="module")
def server(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("live")
    run = Path(shutil.copytree(digits_run, folder / "run"))
    with fedppd_serve(run, folder / "log", "--watch") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=30) as client:
        yield client


def test_a_digit_gets_its_label_and_a_strange_image_an_abstention(http: httpx.Client, digits: Any) -> None:
    digit = png(digits.images[0][0])
    answer = http.post("/predict", content=digit, headers={"Content-Type": PNG}).json()["predictions"][0]
    assert answer["label"] == digits.labels[0]
    assert answer["entropy"] < 0.5
    assert not answer["abstain"]
    grey = png(np.full((28, 28), 127))
    assert http.post("/predict", content=grey, headers={"Content-Type": PNG}).json()["predictions"][0]["abstain"]


def test_the_token_is_asked_for(server: Server) -> None:
    answer = httpx.post(f"{server.url}/predict", content=BODY, headers={"Content-Type": JSON})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    """The proxy, its statistics and the replicas; what belongs to Ray itself is Ray's to guard."""
    import psutil

    family = psutil.Process(server.process.pid).children(recursive=True)
    haproxies = [member for member in family if member.name() == "haproxy"]
    if "HAProxy" not in server.text() or not haproxies:
        pytest.skip("no HAProxy on this platform")
    for member in haproxies:
        for connection in member.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", connection


def test_a_triton_client_gets_what_evaluate_computes(server: Server, digits: Any) -> None:
    rows = np.array(digits.images[:20, 0])
    seen = evaluate_run(server.run)
    expected = np.exp(scaled(seen.log_probabilities[:20], seen.figures["temperature"]))
    # The client writes into the headers it is given: it gets copies.
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    metadata = client.get_model_metadata("digits")
    (image,) = metadata["inputs"]
    assert image == {"name": "image", "datatype": "FP32", "shape": [-1, 28, 28], "parameters": {"range": [0.0, 255.0]}}
    for dtype, kind, binary in ((np.float32, "FP32", True), (np.uint8, "UINT8", True), (np.float32, "FP32", False)):
        tensor = triton.InferInput("image", list(rows.shape), kind)
        tensor.set_data_from_numpy(rows.astype(dtype), binary_data=binary)
        names = [output["name"] for output in metadata["outputs"]]
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        result = client.infer("digits", [tensor], outputs=wanted, headers=dict(HEADERS))
        np.testing.assert_allclose(result.as_numpy("probabilities"), expected, atol=2e-6)
        assert (result.as_numpy("label") == expected.argmax(1)).all()
        assert result.as_numpy("abstain").dtype == bool
        assert result.as_numpy("set")[np.arange(20), expected.argmax(1)].all()
        assert result.as_numpy("class_name").astype(str).tolist() == [str(label) for label in expected.argmax(1)]
    all_outputs = client.infer("digits", [tensor], headers=dict(HEADERS))
    assert all_outputs.as_numpy("entropy").shape == (20,)
    with pytest.raises(triton.InferenceServerException, match="digits"):
        client.get_model_metadata("other")
    wrong = triton.InferInput("image", [1, 5, 5], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 5, 5), np.float32))
    with pytest.raises(triton.InferenceServerException, match="shape"):
        client.infer("digits", [wrong], headers=dict(HEADERS))
    client.close()


def test_a_body_that_never_arrives_is_408(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + b"{")
        started = time.monotonic()
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - started < 20


def test_a_body_too_large_is_413_before_it_is_read(http: httpx.Client, server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {NPY}\r\n"
        connection.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    "header",
    ["X-Request-Id", "X-Session-Id", "X-Request-Disconnect-Disabled", "Authorization", "Content-Type", "X-Any"],
)
def test_a_header_that_is_no_text_is_the_callers_fault(server: Server, header: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n%b: \xff\r\n\r\n" % header.encode()
        )
        answer = b""
        while not answer.endswith(b"}}"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert header.lower().encode() in answer


def damaged(body: bytes, at: int, other: bytes) -> bytes:
    return body[:at] + other + body[at + len(other) :]


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


PATHS = st.sampled_from(
    ["/predict"] * 6 + ["/v2/models/digits/infer"] * 3 + ["/", "/model", "/readyz", "/metrics", "/docs"]
) | st.text("abc/%.~?", max_size=8).map(lambda text: f"/{text.lstrip('/')}")
METHODS = st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
MEDIA_TYPES = st.sampled_from([JSON] * 4 + [PNG, JPEG, NPY, "text/html", "application/json; charset=x", ""])
QUERIES = st.sampled_from(["", "", "", "?coverage=0.9", "?coverage=x", "?coverage=-1", "?%ff=%00"])
NUMBERS = st.integers(-300, 300) | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**30)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=8
)
TENSORS = st.fixed_dictionaries(
    {"name": st.just("image") | st.text(max_size=3), "shape": st.just([1, 28, 28]) | st.lists(st.integers(-3, 30))},
    optional={
        "datatype": st.sampled_from(["FP32", "UINT8", "BYTES", "INT64"]),
        "data": st.just([0] * 784) | VALUES,
        "parameters": VALUES | st.fixed_dictionaries({"binary_data_size": NUMBERS}),
    },
)
SOUND = [png(np.eye(28)), png(np.eye(28), "JPEG"), npy(np.zeros((1, 28, 28), np.uint8)), BODY]
BODIES = st.one_of(
    st.binary(max_size=200),
    VALUES.map(encoded),
    st.fixed_dictionaries({"instances": VALUES}, optional={"coverage": VALUES}).map(encoded),
    st.lists(st.integers(-1, 256), min_size=1, max_size=2).map(
        lambda pixels: encoded({"instances": [np.full((28, 28), pixel).tolist() for pixel in pixels]})
    ),
    st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS, max_size=2)}, optional={"outputs": VALUES, "id": VALUES, "parameters": VALUES}
    ).map(encoded),
    st.builds(damaged, st.sampled_from(SOUND), st.integers(0, 300), st.binary(max_size=6)),
)
EXTRA_HEADERS = st.dictionaries(
    st.sampled_from(["Inference-Header-Content-Length", "X-Request-Id", "Accept", "X-Anything"]),
    st.text("0123456789abc-/*;=", max_size=12),
    max_size=2,
)
# Requests of every kind: sound, damaged, absurd.
REQUESTS = st.fixed_dictionaries(
    {
        "method": METHODS,
        "url": st.builds("{}{}".format, PATHS, QUERIES),
        "headers": st.builds(
            lambda kind, extra: extra | ({"Content-Type": kind} if kind else {}), MEDIA_TYPES, EXTRA_HEADERS
        ),
        "content": BODIES,
    }
)


def test_none_of_2000_requests_makes_it_fail(http: httpx.Client) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(request=REQUESTS)
    def answered(request: dict[str, Any]) -> None:
        answer = http.request(**request)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and request["method"] != "HEAD" and answer.headers["content-type"] == JSON:
            assert answer.json()["error"]

    answered()
    assert statuses.total() >= 2000
    # The requests are not all nonsense: each of the usual outcomes came up.
    assert {200, 400, 404, 405, 415, 422} <= set(statuses), statuses
    assert http.post("/predict", content=BODY, headers={"Content-Type": JSON}).status_code == 200


def test_five_hot_reloads_under_load_fail_no_request(server: Server) -> None:
    async def load() -> tuple[Any, list[float], list[str]]:
        stop = asyncio.Event()
        busy = asyncio.create_task(keep_busy(server.url, 16, stop, BODY))
        versions = []
        async with httpx.AsyncClient() as client:
            for round_id in range(2, 7):
                await asyncio.sleep(0.5)
                version = await asyncio.to_thread(export_again, server.run, round_id)
                versions.append(version)
                async with asyncio.timeout(30):
                    while (await client.get(f"{server.url}/model")).json()["version"] != version:
                        await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        stop.set()
        seen, latencies = await busy
        return seen, latencies, versions

    seen, latencies, versions = asyncio.run(load())
    assert not [key for key in seen if key.startswith("failed")], seen
    assert set(versions) <= set(seen), "every version answered"
    assert sum(seen.values()) > 200
    # Nobody waited for a load: that would be seconds for the requests of that moment.
    assert np.quantile(latencies, 0.99) < 2
    card = httpx.get(f"{server.url}/model").json()
    assert (card["reload"]["reloads"], card["reload"]["error"]) == (5, None)


def test_a_broken_export_is_visibly_refused_while_the_old_one_serves(http: httpx.Client, server: Server) -> None:
    before = http.get("/model").json()
    path = server.run / "student" / "model.json"
    sound = path.read_text()
    path.write_text("{")
    wait_for(lambda: http.get("/model").json()["reload"]["error"] is not None, 20)
    assert (
        http.post("/predict", content=BODY, headers={"Content-Type": JSON}).json()["model"]["version"]
        == before["version"]
    )
    assert "fedppd_reload_failing 1.0" in http.get("/metrics").text
    wait_for(lambda: "refused an export" in server.text(), 20)
    path.write_text(sound)
    wait_for(lambda: http.get("/model").json()["reload"]["error"] is None, 20)


def test_prometheus_finds_the_metrics_at_ray(http: httpx.Client, server: Server) -> None:
    import psutil

    http.post("/predict", content=BODY, headers={"Content-Type": JSON})
    family = psutil.Process(server.process.pid).children(recursive=True)
    ports = {
        connection.laddr.port
        for member in family
        if "Dashboard" in " ".join(member.cmdline()) or "agent" in " ".join(member.cmdline())
        for connection in member.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }

    def found() -> bool:
        return any("ray_fedppd_entropy_nats_bucket" in scrape(port) for port in ports)

    wait_for(found, 60, lambda: f"no port of {ports} exports the service's metrics")


def scrape(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=3).text
    except httpx.HTTPError:
        return ""


def test_stopping_finishes_requests_in_flight(server: Server, http: httpx.Client) -> None:
    """Last in this file: it ends the server."""
    body = npy(np.zeros((4096, 28, 28), np.uint8))
    answers: list[httpx.Response] = []

    def send() -> None:
        answers.append(
            httpx.post(f"{server.url}/predict", content=body, headers={"Content-Type": NPY, **HEADERS}, timeout=60)
        )

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: pending(http) >= 5, 20)
    server.process.send_signal(signal.SIGTERM)  # service managers ask so; Ctrl-C ends the others (live.py)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(len(answer.json()["predictions"]) == 4096 for answer in answers)
    assert server.process.wait(timeout=60) == 0


def pending(http: httpx.Client) -> float:
    (value,) = re.findall(r"^fedppd_pending_requests (.+)$", http.get("/metrics").text, re.MULTILINE)
    return float(value)
