"""`fedppd active` as a user has it: killed in the middle, it goes on; on Ray and without it, the same figures."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, SMALL, command, fedppd, wait_for

AMOUNTS = [
    "--set", "active.labelled=40",
    "--set", "active.pool=80",
    "--set", "active.budget=40",
    "--set", "federation.rounds=1",
]  # fmt: skip


def arguments(out: Path, *extra: str) -> list[str | Path]:
    return ["active", "configs/quickstart.yaml", "--methods", "fedppd", "--out", out, *SMALL, *AMOUNTS, *extra]


def points(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())["points"]


def test_a_study_killed_in_the_middle_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "serial"
    killed = subprocess.Popen(
        command(*arguments(out, "--serial")), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    first = out / "fedppd" / "step-0" / "figures.json"
    wait_for(first.exists, 90, "the first training")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    written = first.stat().st_mtime_ns
    again = fedppd(*arguments(out, "--serial"))
    assert again.returncode == 0, again.stderr
    assert first.stat().st_mtime_ns == written
    assert [(p["acquisition"], p["step"], p["labels"]) for p in points(out)] == [
        (acquisition, step, 40 + 40 * step) for step in range(3) for acquisition in ("entropy", "random")
    ]
    counts = json.loads((out / "fedppd" / "entropy" / "step-2" / "clients.json").read_text())["clients"]
    assert [client["rows"] for client in counts] == [120, 120, 120]
    assert (out / "plots" / "accuracy_against_labels.png").stat().st_size > 0
    assert "| fedppd, entropy |" in again.stdout
    # What is labelled in a step follows from the models before it: longer trainings are another study.
    longer = fedppd(*arguments(out, "--serial", "--set", "federation.rounds=2"))
    assert longer.returncode == 2
    assert "was started for 1 rounds, not 2" in longer.stderr


@pytest.mark.long
def test_on_ray_the_same_figures_come_out(tmp_path: Path) -> None:
    for name, extra in (("serial", ["--serial"]), ("ray", [])):
        done = fedppd(*arguments(tmp_path / name, "--steps", "2", *extra), timeout=240)
        assert done.returncode == 0, done.stderr
    assert points(tmp_path / "ray") == points(tmp_path / "serial")


def test_a_config_without_an_active_section_is_refused_with_the_remedy(tmp_path: Path) -> None:
    done = fedppd("active", "configs/quickstart.yaml", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "configs/active_cifar10.yaml shows one" in done.stderr
