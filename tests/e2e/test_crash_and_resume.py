"""A crash loses nothing: whatever dies, the resumed student has the same bits."""

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, SMALL, command, fedppd, student_digest, train, wait_for


def rounds_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def start(out: Path, *extra: str) -> subprocess.Popen[str]:
    arguments = ["train", "configs/quickstart.yaml", "--out", out, *SMALL, "--set", "federation.rounds=4", *extra]
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def client_processes(driver: int) -> list[int]:
    """Processes of client actors that belong to the driver's own Ray, by walking /proc."""
    parent, title = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                title[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parent[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])

    def belongs(pid: int) -> bool:
        while pid > 1:
            if pid == driver:
                return True
            pid = parent.get(pid, 0)
        return False

    return sorted(pid for pid, text in title.items() if text.startswith("ray::RayClient") and belongs(pid))


@pytest.mark.long
def test_two_rounds_and_resume_to_four_equal_four_in_one_go(uninterrupted, tmp_path):
    out = tmp_path / "run"
    first = train(out, rounds=2)
    assert first.returncode == 0, first.stderr
    second = train(out, "--resume", rounds=4)
    assert second.returncode == 0, second.stderr
    assert student_digest(out) == student_digest(uninterrupted)
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_without_ray_the_same_student_comes_out(uninterrupted, tmp_path):
    out = tmp_path / "run"
    assert train(out, "--serial").returncode == 0
    assert student_digest(out) == student_digest(uninterrupted)


@pytest.mark.parametrize(
    "after_round", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(3, marks=pytest.mark.long)]
)
def test_kill_9_of_the_driver_and_resume_give_the_same_bits(uninterrupted, tmp_path, after_round):
    out = tmp_path / "run"
    driver = start(out)
    wait_for(lambda: rounds_done(out) >= after_round and (out / "config.yaml").exists(), 90, "the round")
    os.kill(driver.pid, signal.SIGSTOP)  # alive, and not finished before the second process has looked
    second = fedppd("resume", out, "--serial")
    assert second.returncode == 2
    assert f"process {driver.pid} on {socket.gethostname()}" in second.stderr
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    # Without Ray, which starts in no time: what was begun on Ray may be finished anywhere.
    resumed = train(out, "--resume", "--serial")
    assert resumed.returncode == 0, resumed.stderr
    assert student_digest(out) == student_digest(uninterrupted)
    assert rounds_done(out) == 4


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_ends_cleanly_says_how_to_go_on_and_can_be_resumed(uninterrupted, tmp_path, sent):
    out = tmp_path / "run"
    driver = start(out)
    wait_for(lambda: rounds_done(out) >= 1, 90, "round 1")
    os.kill(driver.pid, sent)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert f"fedppd resume {out}" in errors
    assert "Traceback" not in errors
    assert fedppd("resume", out, "--serial").returncode == 0
    assert student_digest(out) == student_digest(uninterrupted)


def test_kill_9_of_a_client_process_in_mid_round_does_not_stop_the_run_and_is_reported(uninterrupted, tmp_path):
    out = tmp_path / "run"
    driver = start(out)
    wait_for(lambda: rounds_done(out) >= 1, 90, "round 1")
    victims = client_processes(driver.pid)
    assert len(victims) >= 1
    os.kill(victims[0], signal.SIGSTOP)  # whatever it is doing, it cannot finish it
    os.kill(victims[0], signal.SIGKILL)
    output, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, output + errors
    assert re.search(r"client-\d+ failed \(.*\): trying again", output)
    assert student_digest(out) == student_digest(uninterrupted)
