"""What a PNG or JPEG file claims to be, read from its structure alone, before any decoder sees it.

Decoders walk every chunk, marker and scan there is. A small file can hold hundreds of thousands of empty ones, or the
same scan a thousand times; these functions count, in bounded time, and refuse.
"""

import re
import struct
from dataclasses import dataclass

from serve.refusals import RequestError, image_too_large, invalid, malformed

PNG, JPEG = "image/png", "image/jpeg"
NAMES = {PNG: "PNG", JPEG: "JPEG"}

# Bodies up to this size are looked at where they arrive, to tell quick images from others.
SMALL_BYTES = 64 * 1024
_QUICK_WORK = 1_000_000
_QUICK_PARTS = 64

# Honest files: libpng writes 8 KiB of pixels a chunk, cameras a few dozen markers, ICC profiles up to 255 of them.
_PIXEL_CHUNKS, _OTHER_CHUNKS = 8192, 128
_SEGMENTS, _SCANS, _FILL_BYTES = 512, 40, 1024

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# Decoders skip whatever is no marker, so this does too. In a scan, 0xff00 is a pixel byte and 0xffd0–0xffd7 are its
# restart markers.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_START, _END, _SCAN, _TEMPORARY = 0xD8, 0xD9, 0xDA, 0x01
_RESTARTS = range(0xD0, 0xD8)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class Facts:
    width: int
    height: int
    work: int  # bytes that the decoder will fill, over all of its passes
    parts: int


def examine(body: bytes | bytearray, media_type: str, max_pixels: int) -> Facts:
    """The size and the work that the file announces; raises a refusal for what should not be decoded."""
    facts = _png(body) if media_type == PNG else _jpeg(body)
    if facts.width * facts.height > max_pixels:
        raise image_too_large(f"the image has {facts.width}×{facts.height} pixels; at most {max_pixels:,} are decoded")
    if not facts.width or not facts.height:
        raise malformed("body", f"is a {NAMES[media_type]} image without pixels")
    return facts


def is_quick(body: bytes | bytearray, media_type: str) -> bool:
    """True where decoding takes a few milliseconds at most. Looks at small bodies only, so it is quick itself."""
    if len(body) > SMALL_BYTES:
        return False
    try:
        facts = examine(body, media_type, _QUICK_WORK)
    except RequestError:  # the decoder process will find the same, and say so
        return False
    return facts.work <= _QUICK_WORK and facts.parts <= _QUICK_PARTS


def _png(body: bytes | bytearray) -> Facts:
    if not body.startswith(_SIGNATURE) or body[12:16] != b"IHDR" or len(body) < 33:
        raise malformed("body", "is not a PNG image")
    width, height, depth, colour = struct.unpack_from(">IIBB", body, 16)
    position, pixels, others = 8, 0, 0
    while position + 8 <= len(body):
        length, kind = struct.unpack_from(">I4s", body, position)
        if kind == b"IEND":
            break
        if kind == b"IDAT":
            pixels += 1
        else:
            others += 1
        if pixels > _PIXEL_CHUNKS or others > _OTHER_CHUNKS:
            raise invalid(
                "body", f"the PNG has more than {_PIXEL_CHUNKS:,} pixel chunks or {_OTHER_CHUNKS} others; save it anew"
            )
        position += 12 + length
    work = width * height * _CHANNELS.get(colour, 4) * max(1, depth // 8)
    return Facts(width, height, work, pixels + others)


def _jpeg(body: bytes | bytearray) -> Facts:
    if body[:2] != b"\xff\xd8":
        raise malformed("body", "is not a JPEG image")
    frame: tuple[int, int, int] | None = None
    position, segments, scans, fill = 2, 0, 0, 0
    while match := _MARKER.search(body, position):
        fill += match.start() - position
        segments += 1
        marker = match[0][1]
        position = match.end()
        if segments > _SEGMENTS or fill > _FILL_BYTES:
            raise invalid(
                "body", f"the JPEG has more than {_SEGMENTS} markers or {_FILL_BYTES} fill bytes; save it anew"
            )
        if marker == _END:
            break
        if marker in (_START, _TEMPORARY) or marker in _RESTARTS:
            continue
        if position + 2 > len(body):
            break
        if marker in _FRAMES:
            if frame is not None:
                raise invalid("body", "the JPEG holds more than one frame; save it anew")
            frame = _frame(body, position)
        position += struct.unpack_from(">H", body, position)[0]
        if marker == _SCAN:
            scans += 1
            if scans > _SCANS:
                raise invalid("body", f"the JPEG has more than {_SCANS} scans; save it anew")
            following = _AFTER_SCAN.search(body, position)
            if following is None:
                break
            position = following.start()
    if frame is None:
        raise malformed("body", "is a JPEG image without a frame")
    width, height, components = frame
    return Facts(width, height, width * height * components * max(1, scans), segments)


def _frame(body: bytes | bytearray, position: int) -> tuple[int, int, int]:
    if position + 8 > len(body):
        raise malformed("body", "is a JPEG image that was cut short")
    height, width, components = struct.unpack_from(">HHB", body, position + 3)
    return width, height, components
