"""`fedppd compare` as a user has it: killed in the middle, it goes on, and nothing is done twice."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, SMALL, command, fedppd, wait_for

METHODS = "fedavg,fedppd"
LAST = Path("fedppd") / "seed-0"


def arguments(out: Path, *extra: str, rounds: int = 4) -> list[str | Path]:
    return [
        "compare", "configs/quickstart.yaml", "--methods", METHODS, "--rounds", str(rounds), "--out", out, *SMALL,
        *extra,
    ]  # fmt: skip


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments(out, "--serial")), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rounds_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_seconds(part)
            for key, part in value.items()
            if key not in ("seconds", "seconds_a_round", "time")
        }
    return [without_seconds(part) for part in value] if isinstance(value, list) else value


def results(out: Path) -> Any:
    return without_seconds(json.loads((out / "results.json").read_text()))


def test_kill_9_and_the_same_command_again_give_the_results_of_one_go(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    done = fedppd(*arguments(whole, "--serial"))
    assert done.returncode == 0, done.stderr
    killed = start(out)
    wait_for(lambda: rounds_done(out / LAST) >= 2, 90, "round 2 of the second method")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    finished = out / "fedavg" / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    kept = (out / LAST / "metrics.jsonl").read_text().splitlines()
    assert len(kept) < 4
    again = fedppd(*arguments(out, "--serial"))
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before
    # Seconds are measured: the same lines are lines that were not computed again.
    assert (out / LAST / "metrics.jsonl").read_text().splitlines()[: len(kept)] == kept
    assert results(out) == results(whole)
    assert "fedavg is finished already" in again.stdout
    assert "| fedppd |" in again.stdout


def test_ctrl_c_names_the_command_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped = start(out)
    wait_for(lambda: rounds_done(out / "fedavg" / "seed-0") >= 1, 90, "round 1")
    os.kill(stopped.pid, signal.SIGINT)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert f"fedppd compare configs/quickstart.yaml --methods {METHODS}" in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_failed_method_ends_the_command_with_1_after_the_others(tmp_path: Path) -> None:
    wild = tmp_path / "wild.yaml"
    wild.write_text((ROOT / "configs" / "quickstart.yaml").read_text().replace("rate: 0.12", "rate: 1.0e+30"))
    out = tmp_path / "out"
    done = fedppd(
        "compare", "configs/quickstart.yaml", "--methods", f"wild={wild},fedavg", "--rounds", "1", "--out", out,
        *SMALL, "--serial",
    )  # fmt: skip
    assert done.returncode == 1
    assert "wild (seed 0)" in done.stderr
    assert "wild (failed)" in done.stdout
    assert results(out)["methods"]["fedavg"]["runs"][0]["status"] == "finished"


@pytest.mark.long
def test_on_ray_the_same_figures_come_out(tmp_path: Path) -> None:
    """Every run has its own connection; the second finds Ray as the first did."""
    for name, extra in (("serial", ["--serial"]), ("ray", [])):
        done = fedppd(*arguments(tmp_path / name, *extra, rounds=1), timeout=240)
        assert done.returncode == 0, done.stderr
    assert results(tmp_path / "ray") == results(tmp_path / "serial")


def test_an_unknown_method_ends_the_command_with_2_and_a_suggestion(tmp_path: Path) -> None:
    done = fedppd("compare", "configs/quickstart.yaml", "--methods", "fedpdd", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "did you mean 'fedppd'?" in done.stderr
    assert not (tmp_path / "out").exists()
