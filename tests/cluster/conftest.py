"""A head started by `ray start`, as an operator does, with a port range of its own."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
SERVICE_TOKEN = secrets.token_hex(16)


@dataclass(frozen=True)
class Head:
    """How to reach a running head: its environment is all that a client needs."""

    environment: dict[str, str]
    metrics_port: int

    def submit(self, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """`ray job submit --working-dir . -- python -m fedppd_ray …`, as in the README."""
        command = [RAY, "job", "submit", "--working-dir", ".", "--", "python", "-m", "fedppd_ray", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """With token authentication."""
    yield from running_head("token")


@pytest.fixture
def open_head() -> Iterator[Head]:
    """Without authentication."""
    yield from running_head("disabled")


def running_head(auth_mode: str) -> Iterator[Head]:
    port, dashboard, metrics = free_port(), free_port(), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": auth_mode,
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "FEDPPD_TOKEN": SERVICE_TOKEN,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("RAY_ADDRESS", None)
    if auth_mode == "token":
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="fedppd-ray-") as folder:
        command = [
            RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--port={port}",
            f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}", f"--temp-dir={folder}",
            f"--dashboard-agent-listen-port={free_port()}",  # its default is one port for all Rays of a machine
            "--disable-usage-stats",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        try:
            _wait_for(process, environment)
            yield Head(environment, metrics)
        finally:
            process.terminate()  # --block: the head goes with this process
            process.wait(120)  # a deployed service lets its requests finish first


def _wait_for(process: "subprocess.Popen[str]", environment: dict[str, str]) -> None:
    for _ in range(60):
        if process.poll() is not None:
            raise RuntimeError(f"ray start ended: {process.stdout.read() if process.stdout else ''}")
        # The job server answers before the agent that runs jobs is there: only a job that ran proves both.
        trial = subprocess.run(
            [RAY, "job", "submit", "--", "true"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if trial.returncode == 0:
            return
        time.sleep(1)
    raise RuntimeError(f"the head did not run a job: {trial.stderr[-500:]}")
