"""A run that lives for weeks: it is resumed without repeating anything, and one process at a time writes it."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command, refused

import fedppd_ray as fp
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError, ConfigError, LockedError
from fedppd_ray.runs import lock
from fedppd_ray.runs.journal import note_start, read_journal
from fedppd_ray.runs.store import RunStore
from fedppd_ray.sites.coordinator import Listen, listen_again, options_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(tiny: Callable[..., Config], tmp_path: Path) -> Path:
    """One of three rounds, made by `train`, without Ray."""
    fp.train(tiny(federation={"rounds": 1}), tmp_path / "run", serial=True)
    return tmp_path / "run"


@contextmanager
def at_work(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    script = (
        "import sys, time, pathlib; from fedppd_ray.runs.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def digest(run: Path) -> str:
    return hashlib.sha256((run / "student" / "student.safetensors").read_bytes()).hexdigest()


# ---- going on


def test_resume_needs_nothing_but_the_run_and_gives_the_bits_of_one_go(
    tiny: Callable[..., Config], started: Path, tmp_path: Path
) -> None:
    """It ran without Ray before, so it does now: a cluster would take longer than this test may."""
    fp.resume(started, {"federation.rounds": 3})
    fp.train(tiny(), tmp_path / "one_go", serial=True)
    assert digest(started) == digest(tmp_path / "one_go")
    assert [line["round"] for line in RunStore(started).history()] == [1, 2, 3]


def test_what_a_round_does_about_failures_may_change_on_resume(fedppd: Command, started: Path) -> None:
    changes = ["federation.quorum=0.9", "federation.retries=4", "resources.client_cpus=0.25", "federation.rounds=2"]
    done = fedppd("resume", started, *(part for change in changes for part in ("--set", change)))
    assert done.code == 0, done.err
    config = yaml.safe_load((started / "config.yaml").read_text())
    assert (config["federation"]["quorum"], config["federation"]["retries"]) == (0.9, 4)
    assert config["resources"]["client_cpus"] == 0.25
    again = ["train", started / "config.yaml", "--out", started, "--serial", "--resume"]
    assert fedppd(*again, "--set", "federation.quorum=0.4", "--set", "federation.rounds=3").code == 0
    assert RunStore(started).config().federation.quorum == 0.4


def test_a_deadline_may_be_set_on_resume(tiny: Callable[..., Config], started: Path) -> None:
    assert RunStore(started).resume(tiny(federation={"deadline_s": 60})) is not None


def test_what_changes_a_round_may_not_change_on_resume(fedppd: Command, started: Path) -> None:
    refused(fedppd("resume", started, "--set", "client.epochs=4"), "client.epochs: 1 -> 4")
    refused(fedppd("resume", started, "--set", "federation.quorum=2"), "federation.quorum")
    refused(fedppd("resume", started, "--set", "baseline.rate=1"), "baseline", "does not read it")


def test_resuming_what_is_no_run_leaves_no_trace(fedppd: Command, tmp_path: Path) -> None:
    refused(fedppd("resume", tmp_path / "absent"), "no run folder")
    config = tmp_path / "config.yaml"
    config.write_text("name: x\n")
    refused(fedppd("train", config, "--out", tmp_path / "absent", "--resume", "--serial"), "holds no run to resume")
    assert not (tmp_path / "absent").exists()


def test_a_finished_run_says_how_to_go_on(started: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fedppd"):
        fp.resume(started)
    assert "all 1 rounds are done; a higher federation.rounds goes on" in caplog.text
    assert len(read_journal(started)) == 1


# ---- the journal and the clock


def test_the_journal_has_a_line_per_process_with_its_command_and_version(
    fedppd: Command,
    started: Path,
) -> None:
    assert fedppd("resume", started, "--set", "federation.rounds=2").code == 0
    first, second = read_journal(started)
    assert (first["command"], first["first_round"]) == (None, 1)
    assert second["command"] == f"fedppd resume {started} --set federation.rounds=2"
    assert (second["first_round"], second["version"], second["pid"]) == (2, fp.__version__, os.getpid())
    assert first["options"] == second["options"] == {"address": None, "serial": True, "listen": None}


def test_a_torn_line_of_the_journal_is_left_out(tmp_path: Path) -> None:
    note_start(tmp_path, None, {}, 1)
    with (tmp_path / "journal.jsonl").open("a") as handle:
        handle.write('{"started": "20')
    assert [line["first_round"] for line in read_journal(tmp_path)] == [1]


def test_the_door_for_sites_is_opened_again_from_the_journal(tmp_path: Path) -> None:
    door = Listen("0.0.0.0", 8443, tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "guests", tmp_path / "ca.pem")
    for listen in (door, Listen("::1", 1, tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "guests")):
        kept: dict[str, Any] = json.loads(json.dumps(options_of("auto", False, listen)))
        assert kept["address"] == "auto"
        assert listen_again(kept["listen"]) == listen


def test_every_line_of_metrics_has_the_time_in_utc(started: Path) -> None:
    (line,) = RunStore(started).history()
    written = datetime.fromisoformat(line["time"])
    assert written.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=10)


# ---- the lock


def test_a_second_process_is_refused_with_host_and_process_of_the_first_until_that_is_killed(
    fedppd: Command,
    started: Path,
) -> None:
    before = (started / "config.yaml").read_bytes()
    with at_work(started) as first:
        for _ in range(2):  # who knocks does not wipe the name off the door
            done = fedppd("resume", started, "--set", "federation.rounds=2")
            refused(done, str(started), f"process {first.pid} on {socket.gethostname()}", "wait for it, or stop it")
        assert (started / "config.yaml").read_bytes() == before
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert fedppd("resume", started, "--set", "federation.rounds=2").code == 0
    assert len(RunStore(started).history()) == 2


def test_a_new_run_is_locked_before_it_is_made(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with at_work(tmp_path / "run"), pytest.raises(LockedError, match="another command is at work"):
        fp.train(tiny(), tmp_path / "run", serial=True)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_file_system_without_locks_is_said_and_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No such file system is at hand here: its answer is all that is made up."""

    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with lock.locked(tmp_path):
        pass
    assert "has no locks" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run cannot be made .*choose another --out"):
        fp.train(tiny(), tmp_path / "file" / "run", serial=True)


def test_an_override_of_a_stored_configuration_is_checked(started: Path) -> None:
    with pytest.raises(ConfigError, match=r"federation\.cliens: unknown key"):
        fp.resume(started, {"federation.cliens": 3})
