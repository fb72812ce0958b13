"""Reading a request's body within limits of size, time and of what all requests hold together."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from serve.errors import RequestError
from serve.metrics import Level
from serve.settings import Settings


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

    def __init__(self, settings: Settings, pending: Level) -> None:
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


async def read_body(request: Request, place: Place, settings: Settings) -> bytes:
    most = settings.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError(
            415, "unsupported_encoding", "Content-Encoding", "compressed bodies are not taken", {"Accept-Encoding": ""}
        )
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                place.hold(len(part))
                parts.append(part)
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
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> RequestError:
    # The rest of the body is never read, so the connection cannot be used again.
    return RequestError(
        413, "body_too_large", "body", f"is larger than the {most:,} bytes that are taken", {"Connection": "close"}
    )
