"""Bearer tokens with names, which may change while the service runs, and what happens to those who guess."""

import hashlib
import hmac
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from fedppd_ray.errors import ConfigError

logger = logging.getLogger("fedppd.serve")

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "FEDPPD_TOKEN", "FEDPPD_TOKEN_FILE"
DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_CLIENTS = 10_000


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(environment: Mapping[str, str], file: Path | None = None) -> dict[str, str]:
    """Digests by name, from `file`, $FEDPPD_TOKEN_FILE or $FEDPPD_TOKEN; none where none is set.

    An empty token is refused, not taken for "no token": it is most likely a secret that failed to mount.
    """
    path = file or token_file(environment)
    if path is not None:
        return read_token_file(path)
    if TOKEN_VARIABLE in environment:
        return {DEFAULT_NAME: _digest(environment[TOKEN_VARIABLE].strip(), f"${TOKEN_VARIABLE}")}
    return {}


def token_file(environment: Mapping[str, str]) -> Path | None:
    return Path(environment[TOKEN_FILE_VARIABLE]) if TOKEN_FILE_VARIABLE in environment else None


def read_token_file(path: Path) -> dict[str, str]:
    """One token, or lines of `NAME TOKEN`. Empty lines and those that begin with # do not count."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token file cannot be read ({error})") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"{path}: line {number} is neither TOKEN nor NAME TOKEN")
        name = words[0] if len(words) == 2 else DEFAULT_NAME
        if not _NAME.fullmatch(name) or name in digests:
            raise ConfigError(
                f"{path}: line {number}: the name is used twice, or is not of letters, digits, '.', '_', '-'"
            )
        digests[name] = _digest(words[-1], f"{path}: line {number}")
    if not digests:
        raise ConfigError(f"{path}: the token is empty; put one there, or unset it to serve without")
    return digests


def _digest(token: str, source: str) -> str:
    if not token:
        raise ConfigError(f"{source}: the token is empty; put one there, or unset it to serve without")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{source}: a token is made of printable ASCII characters without spaces")
    return token_digest(token)


class Tokens:
    """Those that are valid now. `refresh` reads the file again where it has changed; a broken one changes nothing."""

    def __init__(self, digests: Mapping[str, str], file: str | None) -> None:
        self._digests = dict(digests)
        self._file = Path(file) if file else None
        self._seen = self._state()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, presented: str) -> str | None:
        """The token's name, or None. Compares with every one, in constant time."""
        digest = token_digest(presented)
        found = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        return found[0] if found else None

    def refresh(self) -> None:
        state = self._state()
        if self._file is None or state is None or state == self._seen:
            return
        self._seen = state
        try:
            fresh = read_token_file(self._file)
        except ConfigError as error:
            logger.error("the tokens stay as they were: %s", error)
            return
        if fresh != self._digests:
            self._digests = fresh
            logger.info("tokens are now: %s", ", ".join(sorted(fresh)))

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat() if self._file else None
        except OSError:  # between two steps of a replacement, or not on this node: the old ones stay valid
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status else None


class Buckets:
    """So many events at once for each client, and so many a second in the long run. Forgets the longest unseen."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait(self, client: str) -> float:
        """Seconds until the client may go on; 0 where it may now."""
        if not self._rate:
            return 0.0
        with self._lock:
            return max(0.0, (1 - self._level(client)) / self._rate)

    def take(self, client: str) -> float:
        """As `wait`; where it is 0, one event counts."""
        if not self._rate:
            return 0.0
        with self._lock:
            level = self._level(client)
            if level < 1:
                return (1 - level) / self._rate
            self._levels[client] = (level - 1, time.monotonic())
            self._levels.move_to_end(client)
            if len(self._levels) > _MOST_CLIENTS:
                self._levels.popitem(last=False)
            return 0.0

    def _level(self, client: str) -> float:
        level, seen = self._levels.get(client, (self._burst, 0.0))
        return min(self._burst, level + self._rate * (time.monotonic() - seen))
