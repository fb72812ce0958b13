"""Requests made to break the service: images by their structure, npy headers, tensors, and bytes on raw sockets."""

import gzip
import json
import socket
import struct
import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.service.conftest import npy, png
from tests.service.live import TOKEN

JSON, PNG, JPEG, NPY = "application/json", "image/png", "image/jpeg", "application/x-npy"
INFER = "/v2/models/digits/infer"
SIZES = st.sampled_from([0, 1, 2, 27, 28, 29, 255, 5000, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])


def chunk(kind: bytes, content: bytes, length: int | None = None, right: bool = True) -> bytes:
    check = zlib.crc32(kind + content) if right else 0
    return struct.pack(">I", len(content) if length is None else length) + kind + content + struct.pack(">I", check)


CHUNKS = st.builds(
    chunk,
    st.sampled_from([b"IDAT", b"PLTE", b"tRNS", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"iCCP", b"acTL", b"IEND"]),
    st.binary(max_size=40) | st.binary(max_size=40).map(zlib.compress) | st.just(zlib.compress(bytes(784 + 28))),
    st.none() | SIZES,
    st.booleans(),
)
HEADERS = st.builds(
    lambda width, height, depth, colour, rest: chunk(
        b"IHDR", struct.pack(">IIBB", width, height, depth, colour) + rest
    ),
    SIZES,
    SIZES,
    st.sampled_from([0, 1, 2, 4, 8, 16, 255]),
    st.sampled_from([0, 2, 3, 4, 6, 7]),
    st.sampled_from([b"\0\0\0", b"\0\0\1", b"\1\1\1"]),
)
PNGS = st.builds(
    lambda head, chunks, end: b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + end,
    HEADERS | st.just(png(np.eye(28))[8:33]),
    st.lists(CHUNKS, max_size=8),
    st.sampled_from([chunk(b"IEND", b""), b""]),
)


def segment(marker: int, content: bytes, length: int | None) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", (len(content) + 2 if length is None else length) % 2**16) + content


SOUND_JPEG = png(np.add.outer(np.arange(40), np.arange(40)) * 3, "JPEG")
SEGMENTS = st.builds(segment, st.integers(0, 255), st.binary(max_size=30), st.none() | SIZES)
JPEGS = st.builds(
    lambda at, parts: SOUND_JPEG[:at] + b"".join(parts) + SOUND_JPEG[at:],
    st.integers(0, len(SOUND_JPEG)),
    st.lists(SEGMENTS, max_size=6),
)

SHAPES = st.lists(
    st.sampled_from(["0", "1", "2", "28", "-1", "0x1c", "True", "1e2", "9" * 30, "9" * 4000, " 28 ", ""]), max_size=5
).map(lambda sides: f"({', '.join(sides)},)" if sides else "()")
DICTIONARIES = st.builds(
    "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}".format,
    st.sampled_from(["'|u1'", "'<f4'", "'>f8'", "'<f2'", "'|O'", "'<i8'", "[('a', '|u1')]", "'<U9'", "1", "'|u1"]),
    st.sampled_from(["True", "False", "0", "None", "[]"]),
    SHAPES | st.just("(1, 28, 28)"),
)
NPYS = st.builds(
    lambda version, text, length, tail: (
        b"\x93NUMPY" + version + struct.pack("<H", (len(text) if length is None else length) % 2**16) + text + tail
    ),
    st.sampled_from([b"\1\0", b"\2\0", b"\3\0", b"\0\0"]),
    (DICTIONARIES | st.text(max_size=60)).map(str.encode),
    st.none() | SIZES,
    st.sampled_from([bytes(784), bytes(784 * 4), b"", bytes(783), b"\xff" * 784 * 4]),
)

NUMBERS = st.integers(-3, 300) | st.floats() | st.sampled_from([10**30, -(10**400), True, None, "1"])
TENSORS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["image", "image", "", "label"]) | st.text(max_size=3),
        "shape": st.just([1, 28, 28]) | st.lists(NUMBERS, max_size=6),
        "datatype": st.sampled_from(["FP32", "UINT8", "INT64", "BYTES", "BOOL", "FP16", "", 1]),
    },
    optional={
        "data": st.just([0] * 784) | st.lists(NUMBERS, max_size=5) | st.just([[0] * 28] * 28),
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": NUMBERS | st.just(784)}),
    },
)
OUTPUTS = st.lists(st.fixed_dictionaries({"name": st.sampled_from(["label", "outside", "x", 3])}), max_size=9)
INFERS = st.builds(
    lambda tensors, rest, tail: json.dumps({"inputs": tensors} | rest).encode() + tail,
    st.lists(TENSORS, max_size=3),
    st.fixed_dictionaries(
        {}, optional={"outputs": OUTPUTS, "id": NUMBERS, "parameters": st.dictionaries(st.text(max_size=9), NUMBERS)}
    ),
    st.sampled_from([b"", bytes(784), bytes(784 * 4)]),
)
LENGTHS = st.sampled_from(["", "0", "10", "-1", "1e3", "9" * 5000, "0x1", "784"]) | st.integers(0, 2000).map(str)


def request(path: str, kind: str, body: bytes, packed: bool, headers: dict[str, str]) -> dict[str, Any]:
    headers = {"Content-Type": kind, **headers} | ({"Content-Encoding": "gzip"} if packed else {})
    return {"method": "POST", "url": path, "content": gzip.compress(body) if packed else body, "headers": headers}


COVERAGES = st.sampled_from(["/predict"] * 4 + ["/predict?coverage=0.8", "/predict?coverage=nan", "/predict?coverage="])
NO_HEADERS: Any = st.just({})
REQUESTS = st.one_of(
    st.builds(request, COVERAGES, st.just(PNG), PNGS, st.booleans(), NO_HEADERS),
    st.builds(request, COVERAGES, st.just(JPEG), JPEGS, st.booleans(), NO_HEADERS),
    st.builds(request, COVERAGES, st.just(NPY), NPYS, st.booleans(), NO_HEADERS),
    st.builds(request, COVERAGES, st.just(NPY), st.just(npy(np.zeros((1, 28, 28)))), st.booleans(), NO_HEADERS),
    st.builds(
        request,
        st.sampled_from([INFER] * 5 + ["/v2/models/x/infer", "/v2/models/digits/versions/1/infer"]),
        st.just(JSON),
        INFERS,
        st.booleans(),
        NO_HEADERS | st.fixed_dictionaries({"Inference-Header-Content-Length": LENGTHS}),
    ),
)

LINES = st.sampled_from(
    [
        "POST /predict HTTP/1.1",
        f"POST {INFER} HTTP/1.1",
        "GET /model HTTP/1.1",
        "GET /healthz HTTP/1.0",
        "POST /predict HTTP/9.9",
        "\x00\xff / HTTP/1.1",
        "GET " + "/a" * 9000 + " HTTP/1.1",
        "PRI * HTTP/2.0",
        "GET /predict?coverage=%ff%00 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "TRACE /predict HTTP/1.1",
    ]
)
FIELDS = st.lists(
    st.sampled_from(
        [
            f"Authorization: Bearer {TOKEN}",
            f"Content-Type: {JSON}",
            f"Content-Type: {NPY}",
            "Content-Length: 4",
            "Content-Length: -1",
            "Content-Length: 4, 5",
            "Content-Length: 99999999999999999999999",
            "Content-Length: \xb2",
            "Transfer-Encoding: chunked",
            "Transfer-Encoding: chunked, identity",
            "Transfer-Encoding: gzip",
            "Expect: 100-continue",
            "Expect: nothing",
            "Content-Encoding: gzip",
            "Content-Encoding: br, gzip",
            "Connection: upgrade",
            "Upgrade: websocket",
            "X-Request-Id: \xff\xfe",
            "traceparent: 00-0-0-0",
            " folded: line",
            "No colon here",
            "X-Long: " + "a" * 9000,
        ]
    ),
    max_size=6,
)
TAILS = st.sampled_from([b"", b"{}{}", b"4\r\n{}{}\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffffff\r\n{}", b"0\r\n" * 9])
SOCKETS = st.builds(
    lambda line, fields, tail: "\r\n".join([line, "Host: x", *fields, "", ""]).encode("latin-1") + tail,
    LINES,
    FIELDS,
    TAILS,
) | st.binary(max_size=60)


def over_a_socket(port: int, content: bytes, seconds: float = 5.0) -> int | None:
    """Sends the bytes, says that no more come, and reads the first answer; None where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while b"\r\n" not in answer and (part := connection.recv(4096)):
                answer += part
        except (TimeoutError, ConnectionError, OSError):
            return None
    words = answer.split(b" ", 2)
    return int(words[1]) if answer.startswith(b"HTTP/") and len(words) > 1 and words[1].isdigit() else None
