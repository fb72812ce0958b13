"""`fedppd serve` with two replicas, as operators run it: abuse, gRPC, metrics of all, tokens that change."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import HealthCheck, Phase, given, settings

from tests.service.abuse import INFER, JSON, NPY, REQUESTS, SOCKETS, over_a_socket
from tests.service.conftest import npy
from tests.service.live import HEADERS, TOKEN, Server, fedppd_serve, free_port, wait_for
from tests.service.test_service_reload import BREAKAGES
from tests.service.test_service_telemetry import samples

BODY = b'{"instances":[' + str(np.zeros((28, 28), int).tolist()).encode() + b"]}"


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(digits_run: Path, tmp_path_factory: pytest.TempPathFactory, grpc_port: int) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operate")
    run = Path(shutil.copytree(digits_run, folder / "run"))
    (folder / "tokens").write_text(f"first {TOKEN}\n")
    options = ["--watch", "--replicas", "2", "--token-file", str(folder / "tokens"), "--grpc-port", str(grpc_port)]
    with fedppd_serve(run, folder / "log", *options) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=30) as client:
        yield client


def ask(server: Server, token: str = TOKEN) -> int:
    """On a connection of its own, so that any replica may answer."""
    headers = {"Content-Type": JSON, "Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.url}/predict", content=BODY, headers=headers, timeout=30).status_code


def abused(server: Server, http: httpx.Client, requests: int, sockets: int) -> Counter[int | None]:
    """No phase that makes failures smaller: each of these costs a request, and the first failure tells enough."""
    statuses: Counter[int | None] = Counter()
    many: Any = {
        "deadline": None,
        "suppress_health_check": list(HealthCheck),
        "database": None,
        "phases": (Phase.generate,),
    }

    @settings(max_examples=requests, **many)
    @given(request=REQUESTS)
    def over_http(request: dict[str, Any]) -> None:
        answer = http.request(**request)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (request, answer.text)

    @settings(max_examples=sockets, **many)
    @given(content=SOCKETS)
    def raw(content: bytes) -> None:
        status = over_a_socket(server.port, content)
        statuses[status] += 1
        # HAProxy itself says 505 to a version of HTTP, and 501 to what it does not implement.
        assert status is None or status < 500 or status in (501, 505), content

    over_http()
    raw()
    assert ask(server) == 200
    answered = samples(http.get("/metrics").text)
    assert not [name for name in answered if name.startswith("fedppd_requests_total") and "'status', '5" in name]
    return statuses


def test_no_abuse_makes_it_fail(server: Server, http: httpx.Client) -> None:
    statuses = abused(server, http, 400, 100)
    assert {200, 400, 413, 422} <= set(statuses), statuses


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_none_of_10000_abuses_makes_it_fail(server: Server, http: httpx.Client) -> None:
    statuses = abused(server, http, 8500, 1500)
    assert statuses.total() >= 10_000
    assert {200, 400, 404, 413, 422} <= set(statuses), statuses


def crafted(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(784)


@pytest.mark.parametrize("shape", [f"(0x{'f' * 3700}, 28, 28)", "(True, 28, 28)"], ids=["hexadecimal", "True"])
def test_a_crafted_npy_header_is_the_callers_fault(http: httpx.Client, shape: str) -> None:
    assert http.post("/predict", content=crafted(shape), headers={"Content-Type": NPY}).status_code == 400


def test_a_length_of_5000_digits_is_the_callers_fault(http: httpx.Client) -> None:
    headers = {"Content-Type": JSON, "Inference-Header-Content-Length": "9" * 5000}
    assert http.post(INFER, content=b"{}", headers=headers).status_code == 400


def test_values_within_0_and_1_get_a_hint(http: httpx.Client) -> None:
    answer = http.post("/predict", content=npy(np.full((1, 28, 28), 0.5)), headers={"Content-Type": NPY})
    assert "255" in answer.json()["hint"]


@pytest.mark.parametrize("name", ["round is text", "risk table is empty", "a class name is null"])
def test_a_card_that_does_not_validate_is_refused(server: Server, http: httpx.Client, name: str) -> None:
    path = server.run / "student" / "model.json"
    sound = path.read_text()

    def reasons() -> set[str | None]:
        return {httpx.get(f"{server.url}/model").json()["reload"]["error"] for _ in range(8)}

    try:
        BREAKAGES[name](server.run)
        wait_for(lambda: None not in reasons(), 30)
        assert all("/" not in str(reason).replace("student/model.json", "") for reason in reasons())
        assert http.post("/predict?coverage=0.8", content=BODY, headers={"Content-Type": JSON}).status_code == 200
        assert samples(http.get("/metrics").text)["fedppd_reload_failing[]"] == 1
    finally:
        path.write_text(sound)
    wait_for(lambda: reasons() == {None}, 30)


def test_metrics_are_those_of_both_replicas(server: Server, http: httpx.Client) -> None:
    name = "fedppd_requests_total[('route', '/predict'), ('status', '200')]"

    def answered() -> float:
        return samples(http.get("/metrics").text).get(name, 0)

    wait_for(lambda: samples(http.get("/metrics").text)["fedppd_replicas[]"] == 2, 30)
    wait_for(lambda: len({answered() for _ in range(10)}) == 1, 30)
    before = answered()
    assert [ask(server) for _ in range(40)] == [200] * 40
    wait_for(lambda: {answered() for _ in range(10)} == {before + 40}, 30, lambda: f"{before} {answered()}")


@pytest.mark.usefixtures("server")
def test_tritons_grpc_client_is_answered_by_both(grpc_port: int, digits: Any) -> None:
    rows = np.array(digits.images[:20, 0])
    tensor = triton.InferInput("image", list(rows.shape), "UINT8")
    tensor.set_data_from_numpy(rows)
    for _ in range(5):
        client = triton.InferenceServerClient(f"127.0.0.1:{grpc_port}")
        found = client.infer("digits", [tensor], headers={"authorization": f"Bearer {TOKEN}"}).as_numpy("label")
        assert (found == digits.labels[:20]).mean() > 0.8
        with pytest.raises(triton.InferenceServerException, match="token"):
            client.infer("digits", [tensor])
        client.close()
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            b"\x2a\x00" * 10**6, metadata=[("authorization", f"Bearer {TOKEN}")]
        )
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def test_tokens_change_without_a_restart(server: Server) -> None:
    """Last: others use the first token."""
    file = server.log.with_name("tokens")
    file.with_suffix(".new").write_text("second another-token\n")
    file.with_suffix(".new").replace(file)
    wait_for(lambda: {ask(server, "another-token") for _ in range(6)} == {200}, 30)
    wait_for(lambda: {ask(server) for _ in range(6)} <= {401, 429}, 30)
