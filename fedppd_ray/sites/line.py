"""The site's line to its coordinator: signed requests over HTTPS, outbound, each by itself. No connection is state.

Whatever breaks is tried again with a fresh signature; what the coordinator refuses is not. Weights go in pieces whose
size follows the line: half after a break, twice after a success.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
from pydantic import ValidationError

from fedppd_ray.errors import ConfigError, FedPPDError
from fedppd_ray.runs.signature import Key, verified
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.tls import Tls

log = logging.getLogger(__name__)
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # between attempts; the last from then on
_SMALLEST = 64 * 2**10
AnyMessage = TypeVar("AnyMessage", bound=wire.Message)


class RefusedError(FedPPDError):
    """The coordinator says no."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason

    def __str__(self) -> str:
        return f"the coordinator refuses ({self.status}): {self.reason}"


class AwayError(FedPPDError):
    """The coordinator cannot be reached now."""


class StoppedError(FedPPDError):
    """The site was told to stop while it waited for the line."""


class Line:
    def __init__(
        self,
        url: str,
        name: str,
        key: Key,
        coordinator: str,
        tls: Tls,
        stop: threading.Event | None = None,
    ) -> None:
        if not url.startswith("https://"):
            raise ConfigError(f"{url}: a site speaks https:// only")
        self._url = url.rstrip("/")
        self._name, self._key, self._coordinator = name, key, coordinator
        # trust_env: HTTPS_PROXY and NO_PROXY count.
        self._http = httpx.Client(verify=tls.context(), timeout=_TIMEOUT, trust_env=True, follow_redirects=False)
        self._stop = stop or threading.Event()
        self._ahead = 0.0  # how far the coordinator's clock is ahead of ours
        self._piece = wire.PIECE
        self.sent = 0  # bytes of weights, those sent again included

    def close(self) -> None:
        self._http.close()

    # ---- messages

    def tell(
        self, path: str, message: wire.Message, answer: type[AnyMessage], task: wire.Task | None = None
    ) -> AnyMessage:
        """POST, until it is answered or refused."""
        return self._read(self._insist("POST", path, message.model_dump_json().encode(), task), answer)

    def tell_once(
        self, path: str, message: wire.Message, answer: type[AnyMessage], task: wire.Task | None = None
    ) -> AnyMessage:
        """POST; AwayError where the line is broken."""
        return self._read(self._once("POST", path, message.model_dump_json().encode(), task), answer)

    def get(self, path: str, answer: type[AnyMessage]) -> AnyMessage:
        return self._read(self._insist("GET", path, b"", None), answer)

    def _read(self, content: bytes, answer: type[AnyMessage]) -> AnyMessage:
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise wire.WireError(f"the coordinator's answer cannot be read: {error.errors()[0]['msg']}") from None

    # ---- weights

    def fetch(self, blob: wire.Blob, task: wire.Task | None, most: int) -> bytes:
        """A body, piece by piece; refuses one that is not what its name says."""
        if blob.size > most:
            raise wire.WireError(f"weights of {blob.size} bytes; this site takes {most}")
        content = bytearray()

        def piece(size: int) -> None:
            path = f"/bodies/{blob.digest}?offset={len(content)}&size={size}"
            part = self._once("GET", path, b"", task)
            if not part:
                raise wire.WireError("the weights end before they are complete")
            content.extend(part)

        while len(content) < blob.size:
            self._adaptively(piece)
        if wire.digest_of(bytes(content)) != blob.digest:
            raise wire.WireError("the weights do not have the digest they were offered with")
        return bytes(content)

    def send(self, content: bytes, blob: wire.Blob, task: wire.Task) -> None:
        """An update, from where an earlier attempt was cut off."""
        have = self.tell("/updates", wire.Announce(task=task, blob=blob), wire.Have, task).have

        def piece(size: int) -> None:
            nonlocal have
            part = content[have : have + size]
            self.sent += len(part)
            path = f"/updates/{blob.digest}?offset={have}&attempt={task.attempt}"
            have = self._read(self._once("PUT", path, part, task), wire.Have).have

        while have < blob.size:
            self._adaptively(piece)

    def _adaptively(self, piece: Callable[[int], None]) -> None:
        for pause in self._pauses():
            try:
                piece(self._piece)
            except AwayError as error:
                log.debug("a piece of %d bytes: %s", self._piece, error)
                self._piece = max(_SMALLEST, self._piece // 2)
                self._sleep(pause)
            else:
                self._piece = min(wire.PIECE, 2 * self._piece)
                return

    # ---- one request

    def _insist(self, method: str, path: str, body: bytes, task: wire.Task | None) -> bytes:
        for pause in self._pauses():
            try:
                return self._once(method, path, body, task)
            except AwayError as error:
                log.debug("%s %s: %s", method, path, error)
                self._sleep(pause)
        raise AssertionError("pauses never end")

    def _pauses(self) -> Iterator[float]:
        for attempt in itertools.count():
            # Not all sites at once, when a coordinator comes back.
            yield _PAUSES[min(attempt, len(_PAUSES) - 1)] * random.uniform(0.7, 1.3)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise StoppedError("stopped")

    def _once(self, method: str, path: str, body: bytes, task: wire.Task | None) -> bytes:
        for first in (True, False):
            status, content = self._exchange(method, path, body, task)
            if status == 200:
                return content
            trouble = self._read(content, wire.Trouble)
            if status in (408, 503):
                raise AwayError(trouble.error)
            if status == 401 and first and trouble.time and "clock" in trouble.error:
                self._ahead = trouble.time - time.time()  # signed by the coordinator, like every answer
                continue
            raise RefusedError(status, trouble.error)
        raise AssertionError("refused or answered by now")

    def _exchange(self, method: str, path: str, body: bytes, task: wire.Task | None) -> tuple[int, bytes]:
        whole = wire.PREFIX + path
        request = identity.Request(
            method,
            whole,
            body,
            self._name,
            f"{time.time() + self._ahead:.3f}",
            identity.new_nonce(),
            task.run if task else identity.NO_RUN,
            str(task.round) if task else identity.NO_ROUND,
        )
        headers = identity.signed_headers(self._key, request, self._coordinator)
        headers[identity.WIRE_VERSION] = wire.version_text()
        try:
            answer = self._http.request(method, self._url + whole, content=body, headers=headers)
        except httpx.TransportError as error:
            raise AwayError(f"{type(error).__name__}: {error}") from None
        signature = answer.headers.get(identity.SIGNATURE, "")
        text = identity.answer_text(request.nonce, answer.status_code, answer.content)
        if not verified(self._coordinator, text, signature):
            # A proxy's own page (502, a login form), or somebody who would like to be the coordinator.
            raise AwayError(f"an answer {answer.status_code} that the coordinator has not signed")
        return answer.status_code, answer.content


def hello(url: str, tls: Tls) -> wire.Hello:
    """Who says to be there; what it says is to be checked against an invitation."""
    try:
        with httpx.Client(verify=tls.context(), timeout=_TIMEOUT, trust_env=True) as http:
            answer = http.get(f"{url.rstrip('/')}/hello")
        found = wire.Hello.model_validate_json(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{url}: no coordinator answers there ({reason}); mend the URL, --ca, --cert or HTTPS_PROXY"
        ) from None
    if why := wire.version_refusal(found.wire):
        raise ConfigError(f"{url}: {why}")
    return found
