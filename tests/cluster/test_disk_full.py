"""A disk that fills up while a round is saved: a small file system of our own, really full."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import fedppd, student_digest

TRAIN = [
    "train", "configs/quickstart.yaml", "--serial", "--set", "federation.clients=2",
    "--set", "data.partition.rows_per_client=80", "--set", "client.epochs=1",
]  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as handle:
        while True:
            handle.write(bytes(4096))


def test_a_full_disk_stops_the_run_with_the_last_round_intact_and_resumable(small_disk, tmp_path):
    out = small_disk / "run"
    assert fedppd(*TRAIN, "--set", "federation.rounds=1", "--out", out).returncode == 0
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        fill(ballast)
    full = fedppd(*TRAIN, "--set", "federation.rounds=3", "--out", out, "--resume")
    assert full.returncode in (1, 2)
    assert "No space left" in full.stderr
    assert "Traceback" not in full.stderr
    ballast.unlink()
    again = fedppd(*TRAIN, "--set", "federation.rounds=3", "--out", out, "--resume")
    assert again.returncode == 0, again.stderr
    reference = tmp_path / "reference"
    assert fedppd(*TRAIN, "--set", "federation.rounds=3", "--out", reference).returncode == 0
    assert student_digest(out) == student_digest(reference)
