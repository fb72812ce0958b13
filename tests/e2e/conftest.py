"""The command line as a user has it: real processes, real Ray, real signals."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Small, but the whole path: ten seconds of start-up and a second per round.
SMALL = [
    "--set", "federation.clients=3",
    "--set", "data.partition.rows_per_client=120",
    "--set", "client.epochs=2",
]  # fmt: skip


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fedppd_ray", *map(str, arguments)]


def fedppd(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def train(out: Path, *extra: str, rounds: int = 4) -> subprocess.CompletedProcess[str]:
    arguments = ["train", "configs/quickstart.yaml", "--out", out, *SMALL]
    return fedppd(*arguments, "--set", f"federation.rounds={rounds}", *extra)


def student_digest(run: Path) -> str:
    return hashlib.sha256((run / "student" / "student.safetensors").read_bytes()).hexdigest()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds in one go."""
    out = tmp_path_factory.mktemp("e2e") / "uninterrupted"
    done = train(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out
