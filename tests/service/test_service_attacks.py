"""Bodies made to be slow: their sender waits, and nobody else. The event loop stays free, slow work is ended."""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from tests.service.conftest import Client, npy, png

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from attack_bodies import JPEG, NPY, PNG, attacks, repeated_scans

# A quarter of what may be sent: before, each of these kept the event loop for 0.1 to 10 seconds.
ATTACKS = attacks("digits", scale=0.25)
# Of the loop's own processor time, so that a busy machine does not matter. Forward passes of up to 4 ms are meant.
MOST_SECONDS = 0.015


@asynccontextmanager
async def http(run: Path, **limits: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application on this very event loop."""
    settings = Settings(run=str(run), **limits)
    app = create_app(Predictor(settings, Metrics()), settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client,
    ):
        yield client


async def longest_turn(stop: asyncio.Event) -> float:
    """The most processor time that the event loop's thread spent between two looks of this task."""
    longest = 0.0
    before = time.thread_time()
    while True:
        await asyncio.sleep(0.0005)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
        if stop.is_set():
            return longest


async def attacked(client: httpx.AsyncClient, path: str, media_type: str, body: bytes) -> tuple[int, float]:
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_turn(stop))
    await asyncio.sleep(0.01)
    answer = await client.post(path, content=body, headers={"Content-Type": media_type})
    stop.set()
    return answer.status_code, await watch


def test_no_body_keeps_the_event_loop(digits_run: Path) -> None:
    async def attack() -> dict[str, tuple[int, float]]:
        async with http(digits_run) as client:
            # Processes and caches are warm, as in a service that has run for a while.
            for sound, kind in ((png(np.eye(28)), PNG), (npy(np.zeros((600, 28, 28))), NPY)):
                await client.post("/predict", content=sound, headers={"Content-Type": kind})
            return {name: await attacked(client, *request) for name, request in ATTACKS.items()}

    gc.freeze()  # as a replica does; a collection of all that the tests hold would count as a turn
    outcomes = asyncio.run(attack())
    gc.unfreeze()
    assert {status for status, _ in outcomes.values()} <= {200, 400, 413, 422}
    assert {name: seconds for name, (_, seconds) in outcomes.items() if seconds > MOST_SECONDS} == {}


def test_decoding_beyond_its_time_is_ended_and_the_next_image_is_answered(
    open_client: Client, digits_run: Path
) -> None:
    client = open_client(digits_run, decode_seconds=0.2)
    slow = repeated_scans(4900, 10**7, most=29)
    started = time.monotonic()
    answer = client.post("/predict", content=slow, headers={"Content-Type": JPEG})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "too_slow_to_decode")
    assert time.monotonic() - started < 5
    sound = client.post("/predict", content=png(np.zeros((300, 300)), "JPEG"), headers={"Content-Type": JPEG})
    assert sound.status_code == 200
    assert "fedppd_decoders_lost_total 1.0" in client.get("/metrics").text


def test_a_small_image_does_not_wait_behind_slow_ones(digits_run: Path) -> None:
    slow = repeated_scans(4900, 10**7, most=29)

    async def ask() -> tuple[bool, int]:
        async with http(digits_run) as client:
            small = {"content": png(np.eye(28)), "headers": {"Content-Type": PNG}}
            await client.post("/predict", **small)
            large = [
                asyncio.create_task(client.post("/predict", content=slow, headers={"Content-Type": JPEG}))
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            answer = await client.post("/predict", **small)
            waited = any(task.done() for task in large)
            for task in large:
                task.cancel()
            return waited, answer.status_code

    assert asyncio.run(ask()) == (False, 200)


def test_a_decoder_that_is_killed_is_replaced(client: TestClient) -> None:
    import psutil

    def decoders() -> list[psutil.Process]:
        family = psutil.Process().children(recursive=True)
        return [member for member in family if "serve.decoder_process" in " ".join(member.cmdline())]

    image = {"content": png(np.eye(28)), "headers": {"Content-Type": PNG}}
    assert client.post("/predict", **image).status_code == 200
    # The nursery too: it is started again.
    for member in decoders():
        member.kill()
    answers = [client.post("/predict", **image).status_code for _ in range(3)]
    assert answers[1:] == [200, 200], answers


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (True, 28, 28), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (0x1, 28, 28), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (0x" + "f" * 3700 + ", 28, 28), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "9" * 3700 + ", 28, 28), }",
        "{'descr': '|u1', 'fortran_order': 1, 'shape': (1, 28, 28), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': 28, }",
        "{'descr': '|u1', 'descr': '|u1', 'shape': (1, 28, 28), }",
        "{" * 3000,
    ],
    ids=str.strip,
)
def test_an_npy_header_that_numpy_would_not_write_is_refused(client: TestClient, header: str) -> None:
    text = header.encode() + b"\n"
    body = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(784)
    answer = client.post("/predict", content=body, headers={"Content-Type": NPY})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")


INFER = "/v2/models/digits/infer"


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "0x10", " 12 ", "٣", "99"])
def test_a_header_length_that_is_none_is_the_callers_fault(client: TestClient, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length.encode(), "Content-Type": "application/json"}
    answer = client.post(INFER, content=b"{}", headers=headers)
    assert answer.status_code == 400
    assert "Inference-Header-Content-Length" in answer.json()["error"]


@pytest.mark.parametrize("number", ["9" * 4000, "-" + "9" * 4000, "1e400", "9" * 5000])
def test_sizes_of_thousands_of_digits_are_the_callers_fault(client: TestClient, number: str) -> None:
    for tensor in (
        '{"name": "image", "shape": [%s, 28, 28], "datatype": "FP32", "data": [0]}',
        '{"name": "image", "shape": [1, 28, 28], "datatype": "FP32", "parameters": {"binary_data_size": %s}}',
        '{"name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": [%s]}',
    ):
        body = '{"inputs": [' + tensor % number + "]}"
        answer = client.post(INFER, content=body.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code in {400, 422}, answer.text


def test_a_long_name_is_not_sent_back_whole(client: TestClient) -> None:
    body = b'{"' + b"a" * 100_000 + b'": 1}'
    answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert len(answer.content) < 1000


def test_a_fault_of_the_service_counts_as_500(
    open_client: Client, digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client(digits_run)

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("serve.answers.describe_predictions", fails)
    answer = client.post("/predict", json={"instances": [np.zeros((28, 28)).tolist()]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    text = client.get("/metrics").text
    assert 'fedppd_requests_total{route="/predict",status="500"} 1.0' in text
    assert "499" not in text
