"""Parsed arrays, kept once per machine: read-only `.npy` maps that every process of a node shares in the page cache.

An entry's name holds a fingerprint of the files it was parsed from (names, sizes, times of change), so that files
replaced in place are read again. The whole folder may be deleted whenever nothing runs.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedppd_ray.data.parts import Split
from fedppd_ray.errors import DataError

# Part of every entry's name: raise it when the meaning of cached files changes.
_VERSION = 2
_IMAGES, _LABELS, _WRITERS, _SKIPPED = "images.npy", "labels.npy", "writers.npy", "skipped.json"


def cache_root() -> Path:
    # An empty XDG_CACHE_HOME counts as unset: otherwise the cache would lie in the root folder.
    base = os.environ.get("FEDPPD_CACHE") or (os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/fedppd"
    return Path(base).expanduser().resolve()


def clear() -> int:
    """Delete everything that was parsed, and what was said of bad files; returns the bytes. Downloads stay."""
    arrays, freed = cache_root() / "arrays", 0
    for path in [*arrays.rglob("*"), *cache_root().glob("*.log")]:
        freed += path.stat().st_size if path.is_file() else 0
    shutil.rmtree(arrays, ignore_errors=True)
    for path in cache_root().glob("*.log"):
        path.unlink()
    return freed


def data_root(root: str | None) -> Path:
    """Where a user's data files are: the setting, $FEDPPD_DATA, or a folder of our own."""
    chosen = root or os.environ.get("FEDPPD_DATA")
    return Path(chosen).expanduser().resolve() if chosen else cache_root() / "downloads"


def entry(title: str, place: Path | None, files: Sequence[Path]) -> Path:
    """The cache folder for what is parsed from these files. `place` is None for data that a package carries."""
    if place is None:
        return cache_root() / "arrays" / f"{title}-embedded-v{_VERSION}"
    return cache_root() / "arrays" / f"{title}-{digest(str(place))}-{_fingerprint(place, files)}-v{_VERSION}"


def newest_entry(title: str, place: Path) -> Path | None:
    """What was last parsed from this place: of use where its files have been removed since."""
    found = (cache_root() / "arrays").glob(f"{title}-{digest(str(place))}-*-v{_VERSION}")
    return max(found, key=lambda folder: folder.stat().st_mtime_ns, default=None)


@contextmanager
def fetching(title: str, place: Path) -> Iterator[None]:
    """Two processes that miss the same files download them one after the other."""
    arrays = cache_root() / "arrays"
    _make(arrays)
    with _locked(arrays / f"{title}-{digest(str(place))}-fetch.lock"):
        yield


def fill(folder: Path, parse: Callable[[], Split]) -> None:
    """Parse into the cache unless that is done already; one process of this machine at a time."""
    if folder.exists():
        return
    _make(folder.parent)
    with _locked(folder.with_suffix(".lock")):
        if not folder.exists():
            _write(folder, parse())


def read(folder: Path) -> Split:
    """Read-only maps of a cached part."""
    writers, skipped = folder / _WRITERS, folder / _SKIPPED
    return Split(
        np.load(folder / _IMAGES, mmap_mode="r"),
        np.load(folder / _LABELS, mmap_mode="r"),
        np.load(writers, mmap_mode="r") if writers.exists() else None,
        json.loads(skipped.read_text(encoding="utf-8")) if skipped.exists() else {},
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _fingerprint(place: Path, files: Sequence[Path]) -> str:
    facts = ((str(path.relative_to(place)), path.stat()) for path in files)
    return digest("\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts))


def _write(folder: Path, split: Split) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        np.save(temporary / _IMAGES, np.ascontiguousarray(split.images))
        np.save(temporary / _LABELS, np.ascontiguousarray(split.labels))
        if split.writers is not None:
            np.save(temporary / _WRITERS, np.ascontiguousarray(split.writers))
        if split.skipped:
            (temporary / _SKIPPED).write_text(json.dumps(dict(split.skipped)), encoding="utf-8")
        # The folder appears complete or not at all.
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set FEDPPD_CACHE to a writable folder"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with the process, so a crash cannot leave it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
