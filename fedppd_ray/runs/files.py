"""Files that appear whole or not at all."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename over it: a crash leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk, half a file is in the way of the next attempt
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, as_json(value))


def as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each durable: what is synced inside is lost with a name that is not."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
