"""The site's folder: its key, whom it has joined, its policy, its audit log, and an update that is on its way out."""

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.errors import ConfigError
from fedppd_ray.runs.files import sha256, write_atomically, write_json
from fedppd_ray.runs.signature import Key, is_public_key
from fedppd_ray.sites.policy import TEMPLATE, Policy, load_policy
from fedppd_ray.sites.tls import Tls

KEY, JOINED, POLICY, AUDIT, SPOOL = "site.key", "joined.json", "policy.yaml", "audit.jsonl", "spool"
_WEIGHTS, _ABOUT = "update.safetensors", "update.json"


@dataclass(frozen=True)
class Joined:
    """The federation that this site is in; `coordinator` is the key that its answers must be signed with."""

    name: str
    url: str
    coordinator: str
    ca: str | None = None
    certificate: str | None = None
    certificate_key: str | None = None

    def tls(self) -> Tls:
        return Tls(self.ca, self.certificate, self.certificate_key)


@dataclass(frozen=True)
class Spooled:
    """An update that was made, and perhaps not yet delivered."""

    made_from: str  # names the work: the configuration, the weights, the rows
    content: bytes
    rows: int
    metrics: Mapping[str, float]


class Home:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()

    def init(self) -> Key:
        """A key and a policy to read and change; refuses to replace a key."""
        key = Key.make(self.folder / KEY)
        if not (self.folder / POLICY).exists():
            write_atomically(self.folder / POLICY, TEMPLATE.encode())
        return key

    def key(self) -> Key:
        if not (self.folder / KEY).exists():
            raise ConfigError(f"{self.folder}: no site was set up here; `fedppd site init` does it")
        return Key.load(self.folder / KEY)

    def policy(self) -> Policy:
        """As the file says now: a change counts from the next round on."""
        return load_policy(self.folder / POLICY)

    def join(self, joined: Joined) -> None:
        write_json(self.folder / JOINED, asdict(joined))

    def joined(self) -> Joined:
        path = self.folder / JOINED
        if not path.exists():
            raise ConfigError(f"{self.folder}: has joined no federation; `fedppd site join URL --code …` does it")
        try:
            joined = Joined(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); join again") from None
        if not is_public_key(joined.coordinator):
            raise ConfigError(f"{path}: coordinator is no public key; join again")
        return joined

    # ---- what has left

    def record(self, what: str, **facts: object) -> None:
        """A line of the audit log, on disk before anything leaves. Each line carries the digest of the one before."""
        lines = self._lines()
        before = sha256(lines[-1].encode()) if lines else ""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "what": what, **facts, "before": before})
        with (self.folder / AUDIT).open("a", encoding="utf-8") as handle:
            handle.write(line + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def releases(self) -> list[dict[str, Any]]:
        """The lines of the audit log. ConfigError where one was changed or taken out."""
        found, before = [], ""
        for number, line in enumerate(self._lines(), start=1):
            entry = json.loads(line)
            if entry["before"] != before:
                raise ConfigError(f"{self.folder / AUDIT}: line {number} does not follow from the one before it")
            before = sha256(line.encode())
            found.append(entry)
        return found

    def updates_released(self) -> int:
        """Different updates that have left: one that had to be sent again counts once."""
        return len({entry["digest"] for entry in self.releases() if entry["what"] == "update"})

    def _lines(self) -> list[str]:
        path = self.folder / AUDIT
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            # The machine died while it wrote; a release comes after its line, so nothing has left.
            text = text[: text.rfind("\n") + 1]
            write_atomically(path, text.encode())
        return text.splitlines()

    # ---- an update on its way

    def spool(self, update: Spooled) -> None:
        """Kept on disk until it is delivered: a killed process need not train again."""
        folder = self.folder / SPOOL
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / _ABOUT).unlink(missing_ok=True)
        write_atomically(folder / _WEIGHTS, update.content)
        about = {"made_from": update.made_from, "rows": update.rows, "metrics": dict(update.metrics)}
        write_json(folder / _ABOUT, {**about, "sha256": sha256(update.content)})

    def spooled(self, made_from: str) -> Spooled | None:
        """The update of this very work, where there is one."""
        folder = self.folder / SPOOL
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            content = (folder / _WEIGHTS).read_bytes()
        except (OSError, ValueError):
            return None
        if about.get("made_from") != made_from or about.get("sha256") != sha256(content):
            return None
        return Spooled(made_from, content, about["rows"], about["metrics"])

    def forget(self) -> None:
        shutil.rmtree(self.folder / SPOOL, ignore_errors=True)
