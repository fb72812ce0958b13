"""The coordinator's folder: its key, the sites it knows, and open invitations. Files, read by whoever needs them.

`fedppd sites` and a running coordinator share it: a removed site is out with its next request.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.errors import ConfigError
from fedppd_ray.runs.files import write_atomically
from fedppd_ray.runs.signature import Key
from fedppd_ray.sites.identity import new_code, proof, same

KEY, SITES, INVITATIONS, INCOMING = "coordinator.key", "sites.json", "invitations.json", "incoming"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Guest:
    name: str
    public_key: str
    joined: float


class Guests:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._read: tuple[object, dict[str, Guest]] = (None, {})

    def key(self) -> Key:
        """Made when it is first needed."""
        return Key.load_or_make(self.folder / KEY)

    def sites(self) -> dict[str, Guest]:
        """Name → site, as the file says now."""
        stamp = _stamp(self.folder / SITES)
        if stamp is None:
            return {}
        if stamp != self._read[0]:
            found = _load(self.folder / SITES)
            self._read = (
                stamp,
                {name: Guest(name, value["public_key"], value["joined"]) for name, value in found.items()},
            )
        return self._read[1]

    def keys(self) -> dict[str, str]:
        return {name: guest.public_key for name, guest in self.sites().items()}

    def invitations(self) -> dict[str, float]:
        """Name → when its open invitation expires."""
        found = _load(self.folder / INVITATIONS)
        return {name: value["until"] for name, value in found.items() if value["until"] > self._clock()}

    def invite(self, name: str, hours: float) -> str:
        """A code for this name; an earlier one is void."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name}: a site's name is made of a–z, 0–9 and hyphens, 63 at most")
        if name in self.sites():
            raise ConfigError(f"{name} has joined already; `fedppd sites remove {name}` first, to have it join anew")
        code = new_code(self.key().public)
        with self._locked():
            found = _load(self.folder / INVITATIONS)
            found[name] = {"code": code, "until": self._clock() + 3600 * hours}
            self._write(INVITATIONS, found)
        return code

    def join(self, name: str, public_key: str, shown: str) -> str | None:
        """Take a site in: why not, or None. The same site with the same key may say it twice."""
        with self._locked():
            guest = self.sites().get(name)
            if guest is not None and guest.public_key == public_key:
                return None
            if guest is not None:
                return "this name is taken"
            open_now = _load(self.folder / INVITATIONS)
            invitation = open_now.get(name)
            if invitation is None or invitation["until"] <= self._clock():
                return "no invitation for this name, or it has expired or was used"
            if not same(proof(invitation["code"], name, public_key), shown):
                return "the code does not fit"
            known = _load(self.folder / SITES)
            known[name] = {"public_key": public_key, "joined": self._clock()}
            self._write(SITES, known)
            del open_now[name]
            self._write(INVITATIONS, open_now)
        return None

    def remove(self, name: str) -> None:
        with self._locked():
            known, open_now = _load(self.folder / SITES), _load(self.folder / INVITATIONS)
            if name not in known and name not in open_now:
                raise ConfigError(f"{name}: neither a site nor invited; `fedppd sites list` shows who is")
            known.pop(name, None)
            open_now.pop(name, None)
            self._write(SITES, known)
            self._write(INVITATIONS, open_now)
        shutil.rmtree(self.folder / INCOMING / name, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Several processes change these files: `sites invite` while a coordinator runs."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / ".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        write_atomically(self.folder / name, (json.dumps(value, indent=2) + "\n").encode())
        os.chmod(self.folder / name, 0o600)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be an object")
    return content
