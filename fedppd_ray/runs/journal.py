"""Who worked on a run: one line per process, with its command, its version and how it worked, for who goes on."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedppd_ray import __version__
from fedppd_ray.runs.clock import now
from fedppd_ray.runs.layout import JOURNAL


def note_start(folder: Path, command: str | None, options: Mapping[str, Any], first_round: int) -> Path:
    """A process begins; `command` is None where it is no command line, `options` is how it works. Returns the file."""
    line = {
        "started": now(),
        "first_round": first_round,
        "command": command,
        "options": dict(options),
        "version": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    path = folder / JOURNAL
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
    return path


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The lines, oldest first; none of a run of an earlier version. A torn line is left out."""
    path, found = folder / JOURNAL, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
