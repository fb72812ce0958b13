"""The wheel in a fresh environment, far from the checkout: the command, the configurations by name, the service."""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "federation.clients=2", "--set", "federation.rounds=1", "--set", "client.epochs=1"]


@pytest.fixture(scope="module")
def fedppd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel itself and, to save minutes, our own dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Its .pth files, and with them our editable install, are not followed from here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=120)
    return folder / "venv" / "bin" / "fedppd"


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(fedppd: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([fedppd, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)


def test_the_wheel_trains_by_name_and_serves_without_a_checkout(fedppd: Path, tmp_path: Path) -> None:
    version = run(fedppd, tmp_path, "--version")
    assert version.stdout.split() == ["fedppd", json.loads(_metadata(fedppd))["version"]]
    trained = run(fedppd, tmp_path, "train", "quickstart", "--out", "run", "--serial", *SMALL)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    unknown = run(fedppd, tmp_path, "train", "quickstrat")
    assert (unknown.returncode, "did you mean 'quickstart'" in unknown.stderr) == (2, True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = subprocess.Popen([fedppd, "serve", "run", "--port", str(port)], cwd=tmp_path, env=environment())
    try:
        assert _answer(f"http://127.0.0.1:{port}/readyz", service)["status"] == "ready"
    finally:
        service.send_signal(signal.SIGTERM)  # as a service manager would
        ended = service.wait(90)
    assert ended == 0


def _metadata(fedppd: Path) -> str:
    code = "import json, fedppd_ray, pathlib; print(json.dumps({'version': fedppd_ray.__version__}))"
    return subprocess.run(
        [fedppd.with_name("python"), "-c", code], capture_output=True, text=True, env=environment(), check=True
    ).stdout


def _answer(url: str, service: "subprocess.Popen[bytes]") -> dict[str, str]:
    limit = time.monotonic() + 150
    while time.monotonic() < limit and service.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                answer: dict[str, str] = json.load(response)
                return answer
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} does not answer")
