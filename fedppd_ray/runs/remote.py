"""Runs in object storage: `s3://bucket/prefix` in the place of a run folder.

A run is always worked on in a local folder. For a URL that is a private temporary one, and the URL is its mirror:
what is needed is pulled when the run is opened, and a round counts as saved once it is pushed. The order of the
uploads makes them atomic: each object appears whole or not at all, and the one that vouches for others (a manifest,
a model card, each with a sha256) comes after them.
"""

import errno
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.runs.layout import CONFIG, TO_READ, TO_RESUME

log = logging.getLogger(__name__)

# Where a run is: the path of a folder, or a URL. (A URL does not survive as a Path: "s3://a" becomes "s3:/a".)
Location = Path | str
Result = TypeVar("Result")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# Seconds between attempts. Reading fails soon, with somebody waiting; a round that was trained is worth a minute.
_READ_PAUSES = (0.5, 1.0, 2.0)
_PUSH_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role"
# By name, since the client library is an optional dependency. No further attempt can mend these.
_FINAL = {
    "NoCredentialsError": f"no credentials; {_CREDENTIALS}",
    "PartialCredentialsError": f"incomplete credentials; {_CREDENTIALS}",
    "ProfileNotFound": "no such AWS_PROFILE",
    "ParamValidationError": "no valid name of a bucket and key",
}


def is_url(location: Location) -> bool:
    return isinstance(location, str) and _URL.fullmatch(location) is not None


def absolute(location: Location) -> str:
    """The location, as a process in another working directory finds it."""
    return str(location) if is_url(location) else str(Path(location).expanduser().absolute())


def read_file(run: Location, name: str) -> bytes:
    """One file of a run, wherever the run is; raises `FileNotFoundError` where it holds none of that name."""
    return connect(str(run)).read(name) if is_url(run) else (Path(run) / name).read_bytes()


@dataclass(frozen=True)
class RunFolder:
    """A run, opened: the local folder to work in, and where it is mirrored."""

    folder: Path
    mirror: "Mirror | None"

    def push(self, paths: Iterable[Path]) -> None:
        if self.mirror:
            self.mirror.push(self.folder, [path.relative_to(self.folder).as_posix() for path in paths])

    def name_of(self, path: Path) -> str:
        """What users call a file of the run."""
        return f"{self.mirror.url}/{path.relative_to(self.folder).as_posix()}" if self.mirror else str(path)


@contextmanager
def open_to_train(location: Location) -> Iterator[RunFolder]:
    """A folder with all that resuming needs; empty where there is no run yet."""
    with _open(location, TO_RESUME) as run:
        yield run


@contextmanager
def open_to_read(location: Location) -> Iterator[RunFolder]:
    """A folder with the run's config, metrics and clients. Its student is read by `read_student(location)`."""
    with _open(location, TO_READ) as run:
        if run.mirror and not (run.folder / CONFIG).exists():
            raise CheckpointError(f"{location} is no run folder: it has no {CONFIG}")
        yield run


@contextmanager
def _open(location: Location, wanted: re.Pattern[str]) -> Iterator[RunFolder]:
    if not is_url(location):
        _refuse_flattened(location)
        yield RunFolder(Path(location), None)
        return
    mirror = connect(str(location))
    # Private to this process and gone with it: what counts lies at the URL, so no stale copy can be believed.
    with tempfile.TemporaryDirectory(prefix="fedppd-run-") as temporary:
        folder = Path(temporary)
        mirror.pull(folder, wanted)
        yield RunFolder(folder, mirror)


class Mirror:
    """The files of a run below a URL. Every object is written whole; failures are tried again, then explained."""

    def __init__(self, url: str, root: str, files: Any, pause: Callable[[float], object] = time.sleep) -> None:
        self.url = url
        self._root = root
        self._files = files  # an fsspec file system
        self._pause = pause
        self._pushed: dict[str, tuple[int, ...]] = {}

    def pull(self, folder: Path, wanted: re.Pattern[str]) -> None:
        """Copy the files of these names into the folder."""
        for name in self.names():
            if wanted.fullmatch(name):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.read(name))
                self._pushed[name] = _stamp(target)

    def read(self, name: str) -> bytes:
        try:
            content: bytes = self._try(partial(self._files.cat_file, self._path(name)), _READ_PAUSES)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{name}") from None
        return content

    def push(self, folder: Path, names: Sequence[str]) -> None:
        """Upload these files of the folder, in this order; absent ones and those already there are left out."""
        for name in names:
            source = folder / name
            if not source.exists() or self._pushed.get(name) == _stamp(source):
                continue
            stamp = _stamp(source)
            try:
                self._try(partial(self._files.put_file, str(source), self._path(name)), _PUSH_PAUSES)
            except FileNotFoundError:
                raise CheckpointError(f"{self.url}: no such bucket any more") from None
            self._pushed[name] = stamp

    def names(self) -> list[str]:
        """All files there are, sorted."""
        try:
            found = self._try(partial(self._files.find, self._root), _READ_PAUSES)
        except FileNotFoundError:
            raise CheckpointError(f"{self.url}: no such bucket; create it, or mend the URL") from None
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def write(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """One object, whole. With `new`, only where there is none; returns whether it was written."""
        options = {"mode": "create"} if new else {}
        try:
            self._try(partial(self._files.pipe_file, self._path(name), content, **options), _PUSH_PAUSES)
        except FileExistsError:
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Delete these files, in this order, where they are."""
        for name in names:
            self._pushed.pop(name, None)
            try:
                self._try(partial(self._files.rm_file, self._path(name)), _READ_PAUSES)
            except FileNotFoundError:
                log.debug("%s/%s was gone already", self.url, name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _try(self, work: Callable[[], Result], pauses: Sequence[float]) -> Result:
        waits = iter(pauses)
        while True:
            try:
                return work()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:  # the client library's errors share no base
                wait = None if _is_final(error) else next(waits, None)
                if wait is None:
                    raise CheckpointError(f"{self.url}: {_reason(error)}") from error
                log.warning("%s: %s; trying again in %g s", self.url, _reason(error), wait)
            self._pause(wait)


def connect(url: str) -> Mirror:
    """The mirror at a URL. Nothing is asked of the storage yet."""
    match = _URL.fullmatch(url)
    scheme, place = (match[1].lower(), match[2].rstrip("/")) if match else ("", "")
    if scheme != "s3":
        raise ConfigError(f"{url}: cannot be a run folder; give a path or s3://bucket/prefix")
    if not place or place.startswith("/"):
        raise ConfigError(f"{url}: names no bucket; give s3://bucket/prefix")
    return Mirror(f"s3://{place}", place, _s3(url))


def _s3(url: str) -> Any:
    try:
        return _s3_files()
    except ImportError as error:
        raise ConfigError(
            f"{url}: runs in object storage need an extra ({error}); install fedppd-ray[s3], for example with "
            f"pip install 'fedppd-ray[s3]'"
        ) from None


@cache
def _s3_files() -> Any:
    """One client a process: it keeps its connections. Credentials and endpoint come from the AWS_… variables."""
    import fsspec

    files = fsspec.filesystem(
        "s3",
        use_listings_cache=False,  # others write there too
        skip_instance_cache=True,
        # We try again ourselves: attempts within attempts would multiply the time until an error shows.
        config_kwargs={"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 1}},
    )
    files.retries = 1
    return files


def _is_final(error: Exception) -> bool:
    return isinstance(error, PermissionError) or type(error).__name__ in _FINAL


def _reason(error: Exception) -> str:
    # The query of a URL in the text says nothing to people.
    name, text = type(error).__name__, re.sub(r"\?[^\s\"]*", "", " ".join(str(error).split()))[:200]
    if isinstance(error, PermissionError):
        return f"access denied ({text}); {_CREDENTIALS}, and what they may do there"
    if name in _FINAL:
        return _FINAL[name]
    if "Connect" in name or isinstance(error, TimeoutError):
        return f"cannot be reached ({text}); check the network and AWS_ENDPOINT_URL"
    return f"{name}: {text}"


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_flattened(location: Location) -> None:
    if str(location).startswith("s3:"):
        raise ConfigError(f"{location}: is neither a path nor a URL; write s3://bucket/prefix, as text")
