"""Bad input is the caller's to mend: a 4xx that names the field. Never a 5xx, never a crash."""

import gzip
import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.conftest import Client, npy, png

JSON, PNG, JPEG, NPY = "application/json", "image/png", "image/jpeg", "application/x-npy"
ZEROS = np.zeros((28, 28)).tolist()


def with_pixel(value: Any) -> Any:
    image = np.zeros((28, 28)).tolist()
    image[3][5] = value
    return image


def instances(*images: Any, **more: Any) -> bytes:
    return json.dumps({"instances": list(images), **more}).encode()


def bomb(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that announces a huge image in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def header_only(text: str) -> bytes:
    padded = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded


def header_of(shape: str) -> bytes:
    return header_only(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}")


BAD: dict[str, tuple[str, bytes, int, str]] = {
    "no body": (JSON, b"", 400, "body"),
    "not JSON": (JSON, b"{", 400, "body"),
    "not UTF-8": (JSON, b'{"instances": "\xff"}', 400, "body"),
    "nested without end": (JSON, b"[" * 100_000, 400, "body"),
    "a list": (JSON, b"[]", 422, "body"),
    "no instances": (JSON, b"{}", 422, "instances"),
    "empty": (JSON, instances(), 422, "instances"),
    "unknown key": (JSON, instances(ZEROS, images=1), 422, "images"),
    "too few rows": (JSON, instances(ZEROS, ZEROS[:-1]), 422, "instances[1]"),
    "too many rows": (JSON, instances([*ZEROS, ZEROS[0]]), 422, "instances[0]"),
    "ragged": (JSON, instances([[0] * 27, *ZEROS[1:]]), 422, "instances[0][0]"),
    "colour for grey": (JSON, instances(np.zeros((28, 28, 3)).tolist()), 422, "instances[0][0][0]"),
    "negative": (JSON, instances(with_pixel(-1)), 422, "instances[0][3][5]"),
    "above 255": (JSON, instances(with_pixel(255.5)), 422, "instances[0][3][5]"),
    "NaN": (JSON, instances(with_pixel(float("nan"))), 422, "instances[0][3][5]"),
    "infinite": (JSON, instances(with_pixel(float("inf"))), 422, "instances[0][3][5]"),
    "a number beyond floats": (JSON, instances(with_pixel(10**400)), 422, "instances[0][3][5]"),
    "a string": (JSON, instances(with_pixel("7")), 422, "instances[0][3][5]"),
    "a truth value": (JSON, instances(with_pixel(True)), 422, "instances[0][3][5]"),
    "null": (JSON, instances(with_pixel(None)), 422, "instances[0][3][5]"),
    "coverage 0": (JSON, instances(ZEROS, coverage=0), 422, "coverage"),
    "coverage 2": (JSON, instances(ZEROS, coverage=2), 422, "coverage"),
    "coverage text": (JSON, instances(ZEROS, coverage="0.9"), 422, "coverage"),
    "no PNG": (PNG, b"hello", 400, "body"),
    "empty PNG": (PNG, b"", 400, "body"),
    "half a PNG": (PNG, png(np.random.default_rng(0).integers(0, 256, (28, 28)))[:200], 400, "body"),
    "a JPEG called PNG": (PNG, png(np.zeros((28, 28)), "JPEG"), 400, "body"),
    "half a JPEG": (JPEG, png(np.random.default_rng(0).integers(0, 256, (90, 90)), "JPEG")[:1500], 400, "body"),
    "bomb of 10,000 megapixels": (PNG, bomb(100_000, 100_000), 413, "body"),
    "bomb of 100 megapixels": (PNG, bomb(10_000, 10_000, bytes(10_000_000)), 413, "body"),
    "PNG of no pixels": (PNG, bomb(0, 0), 400, "body"),
    "PNG that lacks its pixels": (PNG, bomb(1000, 1000, b"\0"), 400, "body"),
    "no npy": (NPY, b"hello", 400, "body"),
    "npy without data": (NPY, npy(np.zeros((2, 28, 28), np.uint8))[:-1], 400, "body"),
    "npy with more data": (NPY, npy(np.zeros((2, 28, 28), np.uint8)) + b"x", 400, "body"),
    "npy of one image": (NPY, npy(np.zeros((28, 28))), 422, "body"),
    "npy of a number": (NPY, npy(np.float32(1)), 422, "body"),
    "npy of other sides": (NPY, npy(np.zeros((1, 28, 29))), 422, "body"),
    "npy of colours": (NPY, npy(np.zeros((1, 28, 28, 3))), 422, "body"),
    "npy of no images": (NPY, npy(np.zeros((0, 28, 28))), 422, "body"),
    "npy with NaN": (NPY, npy(np.full((1, 28, 28), np.nan)), 422, "body"),
    "npy with infinity": (NPY, npy(np.full((1, 28, 28), -np.inf)), 422, "body"),
    "npy above 255": (NPY, npy(np.full((1, 28, 28), 256.0)), 422, "body"),
    "npy of integers": (NPY, npy(np.zeros((1, 28, 28), np.int64)), 422, "body"),
    "npy of text": (NPY, npy(np.array(["a"])), 422, "body"),
    "npy of objects": (NPY, header_only("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"), 422, "body"),
    "npy of records": (NPY, npy(np.zeros(1, [("a", "u1")])), 422, "body"),
    "npy that promises too much": (NPY, header_of("(99999999999999999999, 28, 28)"), 400, "body"),
    "npy of negative size": (NPY, header_of("(-1, 28, 28)"), 400, "body"),
    "npy of odd header": (NPY, header_only("__import__('os').getpid()"), 400, "body"),
    "npy of unbalanced header": (NPY, header_only("{'descr': ((((("), 400, "body"),
    "npy of another version": (NPY, b"\x93NUMPY\x09\x00" + bytes(200), 400, "body"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(client: TestClient, name: str) -> None:
    media_type, body, status, field = BAD[name]
    answer = client.post("/predict", content=body, headers={"Content-Type": media_type})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["field"] == field
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "media_type", ["", "text/plain", "application/octet-stream", "image/gif", "multipart/form-data"]
)
def test_unknown_content_type_is_415(client: TestClient, media_type: str) -> None:
    answer = client.post("/predict", content=b"x", headers={"Content-Type": media_type} if media_type else {})
    assert (answer.status_code, answer.json()["error"]["field"]) == (415, "Content-Type")


def test_an_unknown_compression_is_415(client: TestClient) -> None:
    headers = {"Content-Type": JSON, "Content-Encoding": "br"}
    answer = client.post("/predict", content=instances(ZEROS), headers=headers)
    assert (answer.status_code, answer.json()["error"]["field"]) == (415, "Content-Encoding")


def test_gzip_is_unpacked(client: TestClient) -> None:
    many = instances(*[ZEROS] * 300)
    for media_type, body in ((JSON, instances(ZEROS)), (JSON, many), (PNG, png(np.eye(28)))):
        headers = {"Content-Type": media_type}
        packed = client.post("/predict", content=gzip.compress(body), headers=headers | {"Content-Encoding": "gzip"})
        assert packed.status_code == 200
        assert packed.json() == client.post("/predict", content=body, headers=headers).json()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(bytes(100_000_000)), 413),
        (gzip.compress(gzip.compress(bytes(10**9)[: 10**7])), 400),
        (gzip.compress(instances(ZEROS))[:-5], 400),
        (gzip.compress(instances(ZEROS)) + b"x", 400),
        (b"hello", 400),
        (b"", 400),
    ],
    ids=["a bomb", "twice", "cut short", "more behind it", "no gzip", "empty"],
)
def test_bad_gzip_is_refused(client: TestClient, body: bytes, status: int) -> None:
    headers = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    assert client.post("/predict", content=body, headers=headers).status_code == status


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_413(open_client: Client, digits_run: Path, chunked: bool) -> None:
    client = open_client(digits_run, max_body_bytes=10_000)
    body: Any = iter([b"x" * 1000] * 11) if chunked else b"x" * 10_001
    answer = client.post("/predict", content=body, headers={"Content-Type": JSON})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_too_many_images_are_refused(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, max_images=3)
    many = np.zeros((4, 28, 28), np.uint8)
    for media_type, body in ((JSON, instances(*many.tolist())), (NPY, npy(many))):
        answer = client.post("/predict", content=body, headers={"Content-Type": media_type})
        assert answer.status_code == 422
        assert "3" in answer.json()["error"]["message"]


def test_query_and_body_must_not_contradict_each_other(client: TestClient) -> None:
    headers = {"Content-Type": JSON}
    answer = client.post("/predict?coverage=0.8", content=instances(ZEROS, coverage=0.9), headers=headers)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "coverage")
    for query in ("0", "1.5", "nan", "inf", "x", ""):
        answer = client.post(f"/predict?coverage={query}", content=instances(ZEROS), headers=headers)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "coverage"), query


def test_unknown_path_and_method_are_json_too(client: TestClient) -> None:
    assert client.get("/nothing").json()["error"]["message"] == "Not Found"
    assert client.get("/predict").status_code == 405


def test_overload_is_503_with_retry_after_and_passes(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, max_pending=2, threads=1)
    body = npy(np.zeros((2000, 28, 28), np.uint8))

    def send(_: int) -> Any:
        return client.post("/predict", content=body, headers={"Content-Type": NPY})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    busy = answers[statuses.index(503)]
    assert busy.headers["Retry-After"] == "1"
    assert busy.json()["error"]["code"] == "overloaded"
    assert send(0).status_code == 200


def test_bodies_together_are_bounded(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, max_pending_bytes=5000)
    body = instances(ZEROS)
    assert client.post("/predict", content=body, headers={"Content-Type": JSON}).status_code == 200
    twice = instances(ZEROS, ZEROS)
    assert len(twice) > 5000
    assert client.post("/predict", content=twice, headers={"Content-Type": JSON}).status_code == 503
    assert client.post("/predict", content=body, headers={"Content-Type": JSON}).status_code == 200


def test_slow_prediction_is_504(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, predict_timeout_seconds=0.02, threads=1)
    answer = client.post("/predict", content=npy(np.zeros((4000, 28, 28), np.uint8)), headers={"Content-Type": NPY})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bodies_never_crash(client: TestClient, data: st.DataObject) -> None:
    """Real bodies with bytes changed, cut or repeated: the parsers meet what no one thought of."""
    media_type = data.draw(st.sampled_from([JSON, PNG, JPEG, NPY]))
    sound = {
        JSON: instances(ZEROS),
        PNG: png(np.eye(28) * 255),
        JPEG: png(np.eye(28) * 255, "JPEG"),
        NPY: npy(np.zeros((1, 28, 28), np.uint8)),
    }[media_type]
    body = bytearray(sound)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(len(body), 200)))
        body[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    answer = client.post("/predict", content=bytes(body), headers={"Content-Type": media_type})
    assert answer.status_code in {200, 400, 413, 422}, answer.text


def test_bomb_in_a_text_chunk_is_refused(client: TestClient) -> None:
    text = zlib.compress(bytes(100_000_000))
    content = b"Comment\0\0" + text
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))
    sound = png(np.zeros((28, 28)))
    body = io.BytesIO(sound).getvalue()
    body = body[:33] + chunk + body[33:]
    assert client.post("/predict", content=body, headers={"Content-Type": PNG}).status_code in {200, 400}
