"""Who is who: keys, signed requests and answers, invitations.

A request is signed over everything that gives it meaning: method, path, body, run, round, site, time, a nonce and the
coordinator it is meant for. So nobody in between, a proxy that ends TLS included, can alter, repeat or redirect one.
Answers are signed over the nonce of their request: neither can a configuration or weights be slipped in.
"""

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedppd_ray.errors import ConfigError
from fedppd_ray.runs.signature import Key, verified
from fedppd_ray.sites.wire import digest_of

FRESH_S = 120.0  # how far a request's time may be from the coordinator's
SITE, TIME, NONCE = "fedppd-site", "fedppd-time", "fedppd-nonce"
RUN, ROUND, SIGNATURE, WIRE_VERSION = "fedppd-run", "fedppd-round", "fedppd-signature", "fedppd-wire"
_CODE_BYTES, _FINGERPRINT_BYTES = 15, 10
NO_RUN, NO_ROUND = "-", "-"


@dataclass(frozen=True)
class Request:
    """What a signature covers."""

    method: str
    path: str  # with its query, from the version on
    body: bytes
    site: str
    time: str
    nonce: str
    run: str = NO_RUN
    round: str = NO_ROUND

    def text(self, coordinator: str) -> bytes:
        parts = (self.method, self.path, digest_of(self.body), self.run, self.round, self.site, self.time, self.nonce)
        return "\n".join(("fedppd-request-1", *parts, coordinator)).encode()


def signed_headers(key: Key, request: Request, coordinator: str) -> dict[str, str]:
    return {
        SITE: request.site,
        TIME: request.time,
        NONCE: request.nonce,
        RUN: request.run,
        ROUND: request.round,
        SIGNATURE: key.sign(request.text(coordinator)),
    }


def answer_text(nonce: str, status: int, body: bytes) -> bytes:
    return f"fedppd-answer-1\n{nonce}\n{status}\n{digest_of(body)}".encode()


def new_nonce() -> str:
    return secrets.token_hex(16)


class Doorkeeper:
    """Tells a request of a known site, made for this coordinator just now and never seen before, from all others."""

    def __init__(
        self, coordinator: str, keys: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.time
    ) -> None:
        """`keys`: site → its pinned public key, asked for each request, so that a removed site is out at once."""
        self._coordinator = coordinator
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}  # (site, nonce) → until when a replay would be fresh
        self._swept = self._clock()
        # What an earlier process of the coordinator has seen is not known here: nothing older is let in.
        self._since = self._clock()

    def refusal(self, request: Request, signature: str, key: str | None = None) -> str | None:
        """Why it is not let in, or None. `key`: of one who is joining, and so not pinned yet."""
        pinned = key or self._keys().get(request.site)
        if pinned is None:
            return "no site of this name"
        if not verified(pinned, request.text(self._coordinator), signature):
            return "the signature does not fit"
        now = self._clock()
        try:
            made = float(request.time)
        except ValueError:
            return "no time"
        if not abs(now - made) <= FRESH_S or made < self._since:
            return "too old, or from the future: mend the clock"
        if key is not None:
            return None  # joining twice is joining once; strangers get no room in the memory of nonces
        with self._lock:
            self._sweep(now)
            if (request.site, request.nonce) in self._seen:
                return "seen before"
            self._seen[request.site, request.nonce] = made + FRESH_S
        return None

    def _sweep(self, now: float) -> None:
        if now - self._swept > FRESH_S / 4:
            self._seen = {who: until for who, until in self._seen.items() if until >= now}
            self._swept = now


# ---- invitations


def new_code(coordinator: str) -> str:
    """A one-time code: a secret, and the first bytes of the coordinator's key, so that a guest knows its host."""
    whole = secrets.token_bytes(_CODE_BYTES) + bytes.fromhex(coordinator)[:_FINGERPRINT_BYTES]
    text = base64.b32encode(whole).decode().lower()
    return "-".join(text[start : start + 8] for start in range(0, len(text), 8))


def host_of(code: str) -> str:
    """The first digits of the key of the coordinator that gave this code."""
    try:
        whole = base64.b32decode(code.replace("-", "").upper())
    except ValueError:
        whole = b""
    if len(whole) != _CODE_BYTES + _FINGERPRINT_BYTES:
        raise ConfigError("--code: not an invitation; copy the whole code that `fedppd sites invite` printed")
    return whole[_CODE_BYTES:].hex()


def proof(code: str, name: str, public_key: str) -> str:
    """Binds a name and a key to the code: who passes it on can put no other key in its place."""
    secret = code.replace("-", "").lower().encode()
    return hmac.new(secret, f"fedppd-join-1\n{name}\n{public_key}".encode(), hashlib.sha256).hexdigest()


def same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())
