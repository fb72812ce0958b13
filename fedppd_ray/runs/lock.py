"""One process at a time writes into a folder; the lock goes with its process, so kill -9 leaves none behind.

It is an flock(2) on a file of the folder that says who holds it. On a shared file system it holds between machines as
far as that file system's locks do (NFS since Linux 2.6.12); where it has none, that is logged and nothing is locked.
"""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fedppd_ray.errors import LockedError
from fedppd_ray.runs.clock import now
from fedppd_ray.runs.layout import LOCK

log = logging.getLogger(__name__)

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, which is there, for as long as this process works in it; refused where another one does."""
    # Not "w": the holder's name must survive whoever knocks. Children do not inherit it (PEP 446), so none outlives us.
    with (folder / LOCK).open("a+", encoding="utf-8") as handle:
        _take(handle, folder)
        handle.truncate(0)
        handle.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now()}) + "\n")
        handle.flush()
        yield


def _take(handle: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"{folder}: another command is at work there: {_holder(handle)}; wait for it, or stop it"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        log.warning("%s: this file system has no locks; see to it that no second process writes there", folder)


def _holder(handle: TextIO) -> str:
    handle.seek(0)
    try:
        entry = json.loads(handle.read())
        return f"process {entry['pid']} on {entry['host']}, since {entry['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has just begun"
