"""A registry of students: versions that never change, and pointers that move only with a line in the log.

The log is the truth. Its last line holds the state, and the pointers are a copy of it that readers follow: a process
that dies between the two leaves them one step behind, and the next that writes sets them right.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.releases.layout import (
    FIGURES,
    GATES,
    MANIFEST,
    MARK,
    POINTERS,
    VERDICT,
    VERSION,
    VERSIONS,
    version_file,
    version_folder,
    version_name,
)
from fedppd_ray.releases.place import Place, place_at
from fedppd_ray.releases.state import Entry, State, What, now
from fedppd_ray.releases.verdict import Verdict
from fedppd_ray.runs.files import as_json, sha256
from fedppd_ray.runs.layout import CARD, SIGNATURE, WEIGHTS, student_file
from fedppd_ray.runs.remote import Location, read_file

_FORMAT = 1
_ATTEMPTS = 20
_STUDENT = (student_file(WEIGHTS), student_file(SIGNATURE), student_file(CARD))


class Registry:
    """The registry at a folder or URL, which exists."""

    def __init__(self, location: Location, place: Place | None = None) -> None:
        self.location = location
        self._place = place or place_at(location)

    @classmethod
    def open(cls, location: Location) -> "Registry":
        registry = cls(location)
        try:
            mark = json.loads(registry._place.read(MARK))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{location}: is no registry; `fedppd promote RUN --to {location}` makes one") from None
        except ValueError as error:
            raise CheckpointError(f"{location}/{MARK}: is not valid JSON ({error})") from None
        if not isinstance(mark, dict) or mark.get("format") != _FORMAT:
            raise CheckpointError(f"{location}/{MARK}: not a registry of format {_FORMAT}; a newer version may read it")
        return registry

    @classmethod
    def open_or_create(cls, location: Location) -> "Registry":
        if not is_registry(location):
            place = place_at(location)
            if place.names():
                raise ConfigError(
                    f"{location}: holds something else; name a registry, or a folder that is new or empty"
                )
            place.create(MARK, as_json({"format": _FORMAT}))
        return cls.open(location)

    # ---- versions

    def stage(self, run: Location) -> str:
        """Copy the exported student of a run here, not yet as a version; returns the name that it will have."""
        try:
            card, weights = (read_file(run, student_file(name)) for name in (CARD, WEIGHTS))
            content = json.loads(card)
            version = version_name(content["round"], content["sha256"], sha256(card))
        except OSError as error:
            raise CheckpointError(f"{run}: has no exported student ({error.strerror}); is it a finished run?") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{run}: its model card cannot be read ({error})") from None
        if sha256(weights) != content["sha256"] or not VERSION.fullmatch(version):
            raise CheckpointError(f"{run}: its weights are not those of its card; is it being exported just now?")
        files = dict(zip(_STUDENT, (weights, _read_or_none(run, student_file(SIGNATURE)), card), strict=True))
        if not self.has(version):
            for name, found in files.items():
                if found is not None:
                    self._place.write(version_file(version, name), found)
        return version

    def seal(self, version: str, figures: Mapping[str, Any], source: Location, who: str) -> None:
        """From now on it is a version, and does not change. Again: nothing happens."""
        if self.has(version):
            return
        self._place.write(version_file(version, FIGURES), as_json(figures))
        card = json.loads(self._place.read(version_file(version, student_file(CARD))))
        digests = {name: self._digest(version_file(version, name)) for name in (*_STUDENT, FIGURES)}
        manifest = {
            "version": version,
            "name": card["name"],
            "method": card["method"],
            "round": card["round"],
            "digests": {name: digest for name, digest in digests.items() if digest is not None},
            "source": str(source),
            "registered": now(),
            "by": who,
        }
        self._place.create(version_file(version, MANIFEST), as_json(manifest))

    def has(self, version: str) -> bool:
        return self._exists(version_file(version, MANIFEST))

    def versions(self) -> list[dict[str, Any]]:
        """Their manifests, the newest last."""
        names = [name for name in self._place.names(VERSIONS) if name.endswith(f"/{MANIFEST}")]
        return sorted((self._json(name) for name in names), key=lambda known: str(known["registered"]))

    def manifest(self, version: str) -> dict[str, Any]:
        if not VERSION.fullmatch(version) or not self.has(version):
            raise ConfigError(f"{self.location}: has no version {version!r}; `fedppd registry list` tells which")
        return self._json(version_file(version, MANIFEST))

    def folder_of(self, version: str) -> Location:
        """Where its student is: what `read_student` and `fedppd serve` take for a run."""
        return f"{self.location}/{version_folder(version)}"

    def verified(self, version: str) -> Location:
        """As `folder_of`; CheckpointError where a file is not the one that was registered."""
        for name, digest in self.manifest(version)["digests"].items():
            path = version_file(version, name)
            if self._digest(path) != digest:
                raise CheckpointError(f"{self.location}/{path}: is not what was registered; restore it from a backup")
        return self.folder_of(version)

    def figures(self, version: str) -> dict[str, Any]:
        return self._json(version_file(version, FIGURES))

    # ---- verdicts and gates

    def write_verdict(self, verdict: Verdict) -> None:
        stamp = "".join(character for character in verdict.at if character not in "-:").replace("+0000", "Z")
        path = version_file(verdict.version, f"{VERDICT}{stamp}")
        self._place.write(f"{path}.md", verdict.markdown().encode())
        self._place.write(f"{path}.json", verdict.model_dump_json(indent=2).encode() + b"\n")

    def verdict_of(self, version: str) -> Verdict | None:
        """The newest."""
        names = self._place.names(version_folder(version))
        found = [name for name in names if name.endswith(".json") and f"/{VERDICT}" in name]
        return Verdict.model_validate_json(self._place.read(found[-1])) if found else None

    def own_gates(self) -> bytes | None:
        return self._place.read(GATES) if self._exists(GATES) else None

    # ---- pointers and log

    def state(self) -> State:
        """Where the pointers are: one small file, to be looked at often."""
        try:
            content = json.loads(self._place.read(POINTERS))
            return State.model_validate({key: value for key, value in content.items() if key != "number"})
        except FileNotFoundError:
            return State()
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.location}/{POINTERS}: cannot be read ({error})") from None

    def entries(self) -> list[Entry]:
        """The log, oldest first. CheckpointError where a line was changed or taken out."""
        found, before = [], ""
        for number, line in enumerate(self._place.lines(), start=1):
            entry = self._entry(line)
            if entry.before != before or entry.number != number:
                raise CheckpointError(f"{self.location}: line {number} of the audit log does not follow from the last")
            before = sha256(line.encode())
            found.append(entry)
        return found

    def move(
        self,
        change: Callable[[State], State],
        *,
        who: str,
        what: What,
        version: str,
        why: str,
        forced: bool = False,
    ) -> Entry:
        """Move pointers, with a line in the log before. `change` sees the newest state, and may refuse by raising."""
        for _ in range(_ATTEMPTS):
            count, last = self._place.tail()
            state = self._entry(last).state if last else State()
            entry = Entry(
                number=count + 1,
                time=now(),
                who=who,
                what=what,
                version=version,
                why=why,
                forced=forced,
                state=change(state),
                before=sha256(last.encode()) if last else "",
            )
            if self._place.append(entry.model_dump_json(), after=count):
                self.settle()
                return entry
        raise CheckpointError(f"{self.location}: others write to it all the time; try again")

    def settle(self) -> None:
        """Pointers as the last line of the log has them; again where the log has gone on meanwhile."""
        written = None
        while True:
            count, last = self._place.tail()
            if count == written or last is None:
                return
            state = self._entry(last).state.model_dump(mode="json")
            self._place.write(POINTERS, as_json({"number": count, **state}))
            written = count

    def _entry(self, line: str) -> Entry:
        try:
            return Entry.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise CheckpointError(
                f"{self.location}: the audit log is damaged ({first['loc']}: {first['msg']})"
            ) from None

    def _exists(self, name: str) -> bool:
        return self._digest(name) is not None

    def _digest(self, name: str) -> str | None:
        """None where there is no such file."""
        try:
            return sha256(self._place.read(name))
        except FileNotFoundError:
            return None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self._place.read(name))
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointError(f"{self.location}/{name}: cannot be read ({error})") from None
        return content


def is_registry(location: Location) -> bool:
    """Whether students are registered here; a run folder is none."""
    try:
        read_file(location, MARK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read_or_none(run: Location, name: str) -> bytes | None:
    try:
        return read_file(run, name)
    except FileNotFoundError:
        return None
