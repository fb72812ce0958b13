"""Who asked for what, and what became of it: one JSON line a request, written by a thread of its own."""

import contextlib
import logging
import os
import re
import secrets
import threading
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

logger = logging.getLogger("fedppd.serve")

REQUEST_ID = "x-request-id"
_SOUND = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_FLUSH_SECONDS = 0.5
_MOST_WAITING = 100_000

current_request: ContextVar[str] = ContextVar("request", default="-")


def sound_request_id(given: bytes | None) -> bytes:
    """The caller's, where it is one word of plain characters; else a new one. It ends up in logs and headers."""
    if given is not None and _SOUND.fullmatch(given):
        return given
    return secrets.token_hex(16).encode()


class WithRequest(logging.Filter):
    """Puts the request's id into every log line that is written on its behalf."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request = current_request.get()
        return True


class AccessLog:
    """Lines wait in memory for half a second at most; whole blocks are appended, so that replicas may share a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def add(self, **entry: Any) -> None:
        self._waiting.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry})

    def _write(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines: list[bytes] = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(to_json(self._waiting.popleft()) + b"\n")
        if not lines:
            return
        try:
            # Opened each time: a log that was rotated away is begun anew.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
            try:
                os.write(descriptor, b"".join(lines))
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.error("%d lines of the access log %s are lost (%s)", len(lines), self._path, error)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
