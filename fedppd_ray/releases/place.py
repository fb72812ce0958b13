"""Files of a registry, in a folder or at a URL: read, written whole, created once, and a log that is only added to.

Whoever adds to the log says how many lines it has read. If another was faster, nothing is added, and it has to look
again: so decisions of many processes form one sequence, without a server.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fedppd_ray.releases.layout import AUDIT, AUDIT_LOCK, audit_number, audit_object
from fedppd_ray.runs.files import make_folder, sync_folder, write_atomically
from fedppd_ray.runs.remote import Location, Mirror, connect, is_url


class Place(Protocol):
    def read(self, name: str) -> bytes:
        """FileNotFoundError where there is none of that name."""

    def write(self, name: str, content: bytes) -> None:
        """Readers see the old file or the new one."""

    def create(self, name: str, content: bytes) -> bool:
        """Write it unless it is there; whether this call wrote it."""

    def names(self, folder: str = "") -> list[str]:
        """All files below a folder, sorted, by their names from the top."""

    def lines(self) -> list[str]:
        """The log."""

    def tail(self) -> tuple[int, str | None]:
        """How many lines the log has, and the last."""

    def append(self, line: str, after: int) -> bool:
        """Add a line to a log that has `after` lines; False, and nothing added, where it has not."""


class Folder:
    """A folder that every reader and writer has mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        self._whole(name, content).rename(self._folder / name)
        sync_folder((self._folder / name).parent)

    def create(self, name: str, content: bytes) -> bool:
        whole = self._whole(name, content)
        try:
            os.link(whole, self._folder / name)  # fails where the name is taken
        except FileExistsError:
            return False
        finally:
            whole.unlink()
        sync_folder((self._folder / name).parent)
        return True

    def _whole(self, name: str, content: bytes) -> Path:
        """The content on disk, by another name; no two writers have the same one."""
        path = self._folder / name
        make_folder(path.parent)
        whole = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        write_atomically(whole, content)
        return whole

    def names(self, folder: str = "") -> list[str]:
        files = (path for path in (self._folder / folder).rglob("*") if path.is_file())
        return sorted(path.relative_to(self._folder).as_posix() for path in files)

    def lines(self) -> list[str]:
        path = self._folder / AUDIT
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A line without its end was being written when the machine died: the decision was not taken.
        return text[: text.rfind("\n") + 1].splitlines()

    def tail(self) -> tuple[int, str | None]:
        lines = self.lines()
        return len(lines), lines[-1] if lines else None

    def append(self, line: str, after: int) -> bool:
        with self._alone():
            lines = self.lines()
            if len(lines) != after:
                return False
            path = self._folder / AUDIT
            whole = sum(len(known.encode()) + 1 for known in lines)
            if path.exists() and path.stat().st_size > whole:
                os.truncate(path, whole)
            with path.open("ab") as handle:
                handle.write(line.encode() + b"\n")
                handle.flush()
                os.fsync(handle.fileno())
            return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / AUDIT_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Bucket:
    """Object storage. Each line of the log is an object of its own, because objects cannot be added to."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def read(self, name: str) -> bytes:
        return self._mirror.read(name)

    def write(self, name: str, content: bytes) -> None:
        self._mirror.write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        # The answer to an earlier attempt may have been lost on the way: then it is there, by our own hand.
        return self._mirror.write(name, content, new=True) or self.read(name) == content

    def names(self, folder: str = "") -> list[str]:
        return [name for name in self._mirror.names() if name.startswith(f"{folder}/" if folder else "")]

    def lines(self) -> list[str]:
        return [self.read(name).decode() for name in self._objects()]

    def tail(self) -> tuple[int, str | None]:
        known = self._objects()
        return len(known), self.read(known[-1]).decode() if known else None

    def _objects(self) -> list[str]:
        return [name for name in self.names("audit") if audit_number(name) is not None]

    def append(self, line: str, after: int) -> bool:
        return self.create(audit_object(after + 1), line.encode())


def place_at(location: Location) -> Place:
    return Bucket(connect(str(location))) if is_url(location) else Folder(Path(location))
