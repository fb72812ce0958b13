"""Reading a request's body within limits of size, time and of what all requests hold together."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from serve.metrics import Gauge
from serve.refusals import RequestError, malformed
from serve.settings import Settings

_PIECE_BYTES = 128 * 1024


class Overload(RequestError):
    def __init__(self, settings: Settings) -> None:
        super().__init__(
            503,
            "overloaded",
            "",
            "the service is busy; try again",
            {"Retry-After": str(settings.retry_after_seconds)},
        )


class Admission:
    """Bounds what waits in a replica: so many requests, with bodies of so many bytes together. The rest gets 503."""

    def __init__(self, settings: Settings, pending: Gauge) -> None:
        self._settings = settings
        self._pending = pending
        self._requests = 0
        self._bytes = 0

    @contextmanager
    def admit(self) -> Iterator["Place"]:
        if self._requests >= self._settings.max_pending:
            raise Overload(self._settings)
        self._requests += 1
        self._pending.set(self._requests)
        place = Place(self)
        try:
            yield place
        finally:
            self._requests -= 1
            self._bytes -= place.held
            self._pending.set(self._requests)

    def reserve(self, count: int) -> None:
        if self._bytes + count > self._settings.max_pending_bytes:
            raise Overload(self._settings)
        self._bytes += count


class Place:
    """One admitted request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.held = 0

    def hold(self, count: int) -> None:
        self._admission.reserve(count)
        self.held += count


async def read_body(request: Request, place: Place, settings: Settings) -> bytes | bytearray:
    """The body, unpacked where it came compressed."""
    most = settings.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
        raise _too_large(most)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise RequestError(
            415, "unsupported_encoding", "Content-Encoding", "only gzip is taken", {"Accept-Encoding": "gzip"}
        )
    # One buffer that grows: to join all parts of a large body at the end would hold up everybody.
    body: bytes | bytearray = b""
    parts = request.stream() if encoding == "identity" else _unpacked(request.stream())
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            async for part in parts:
                if not part:
                    continue
                if len(body) + len(part) > most:
                    raise _too_large(most)
                place.hold(len(part))
                if not body:
                    body = part
                elif isinstance(body, bytes):
                    body = bytearray(body) + part
                else:
                    body += part
    except TimeoutError:
        raise RequestError(
            408,
            "body_timeout",
            "body",
            f"did not arrive within {settings.body_timeout_seconds:g} s",
            {"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise RequestError(400, "disconnected", "body", "the connection closed before the body was complete") from None
    return body


async def _unpacked(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A gzip stream in pieces of bounded size: a few bytes may stand for gigabytes, which the caller stops counting."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        async for part in parts:
            waiting = part
            while waiting and not unpacker.eof:
                yield unpacker.decompress(waiting, _PIECE_BYTES)
                waiting = unpacker.unconsumed_tail
                await asyncio.sleep(0)  # others have their turn
            if unpacker.eof and (waiting or unpacker.unused_data):
                raise malformed("body", "has something behind its gzip stream")
    except zlib.error:
        raise malformed("body", "is not a readable gzip stream") from None
    if not unpacker.eof:
        raise malformed("body", "is a gzip stream that was cut short")


def _too_large(most: int) -> RequestError:
    # The rest of the body is never read, so the connection cannot be used again.
    return RequestError(
        413, "body_too_large", "body", f"is larger than the {most:,} bytes that are taken", {"Connection": "close"}
    )
