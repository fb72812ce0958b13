"""`ray job submit` against a running head, with token authentication and without."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import RAY, ROOT, SERVICE_TOKEN, Head, free_port
from tests.e2e.conftest import SMALL, fedppd, student_digest

TRAIN = ["train", "configs/quickstart.yaml", *SMALL]


def assert_trains(head: Head, folder: Path) -> None:
    out = folder / "run"
    done = head.submit(*TRAIN, "--set", "federation.rounds=2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"round 1/2  3 clients  accuracy", done.stdout)
    assert re.search(r"round 2/2  3 clients  accuracy", done.stdout)
    assert fedppd("data", "sample", "mnist5k", folder / "digit.png").returncode == 0
    answer = json.loads(fedppd("predict", out, folder / "digit.png", "--json").stdout)[0]
    assert abs(sum(answer["probabilities"]) - 1) < 1e-9


def test_a_job_with_a_token_trains_and_serve_deploy_serves_its_student(head: Head, tmp_path: Path):
    assert_trains(head, tmp_path)
    config = yaml.safe_load((ROOT / "serve" / "config.yaml").read_text())
    port = free_port()
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["run"] = str(tmp_path / "run")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    _serve(head, "deploy", str(tmp_path / "config.yaml"))
    answer = _predict(port, (tmp_path / "digit.png").read_bytes())
    _serve(head, "shutdown", "--yes")  # its replica holds a core that the next job needs
    card = json.loads((tmp_path / "run" / "student" / "model.json").read_text())
    assert answer["model"]["version"] == card["version"]
    assert abs(sum(answer["predictions"][0]["probabilities"]) - 1) < 1e-6


def _serve(head: Head, *arguments: str) -> None:
    done = subprocess.run(
        [str(Path(RAY).with_name("serve")), *arguments],
        env=head.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _predict(port: int, image: bytes) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", image, {"Content-Type": "image/png"})
    request.add_header("Authorization", f"Bearer {SERVICE_TOKEN}")
    for _ in range(300):  # `serve deploy` returns before the replica is up
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return dict(json.load(response))
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    pytest.fail("the deployed service did not answer")


def test_a_job_with_a_wrong_token_is_refused(head: Head, tmp_path: Path):
    stranger = Head({**head.environment, "RAY_AUTH_TOKEN": "0" * 64}, head.metrics_port)
    done = stranger.submit(*TRAIN, "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()


def test_a_job_that_fails_says_why_and_exits_non_zero(head: Head, tmp_path: Path):
    done = head.submit(
        "train", "configs/quickstart.yaml", "--set", "federation.clients=0", "--out", str(tmp_path / "x")
    )
    assert done.returncode == 1
    assert "federation.clients" in done.stdout + done.stderr


def test_a_stopped_job_is_resumed_by_the_next_and_its_gauges_are_on_the_metrics_port(head: Head, tmp_path: Path):
    out = tmp_path / "run"
    arguments = [*TRAIN, "--set", "federation.rounds=400", "--out", str(out)]
    command = [
        RAY,
        "job",
        "submit",
        "--no-wait",
        "--working-dir",
        ".",
        "--submission-id",
        f"stop-{tmp_path.name}",
        "--",
    ]
    started = subprocess.run(
        [*command, "python", "-m", "fedppd_ray", *arguments],
        cwd=ROOT, env=head.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    metrics = out / "metrics.jsonl"
    for _ in range(900):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            break
        time.sleep(0.1)
    assert _gauge(head, "ray_fedppd_round") >= 1
    stopped = subprocess.run(
        [RAY, "job", "stop", f"stop-{tmp_path.name}"],
        env=head.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    rounds = len(metrics.read_text().splitlines())
    resume = [*TRAIN, "--set", f"federation.rounds={rounds + 1}", "--out", str(out), "--resume-if-exists"]
    resumed = head.submit(*resume)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = [json.loads(line)["round"] for line in metrics.read_text().splitlines()]
    assert lines == list(range(1, rounds + 2))
    alone = tmp_path / "alone"
    assert fedppd(*TRAIN, "--set", f"federation.rounds={rounds + 1}", "--out", alone, "--serial").returncode == 0
    assert student_digest(out) == student_digest(alone)


def _gauge(head: Head, name: str) -> float:
    """Ray exports gauges every few seconds."""
    for _ in range(450):
        page = urllib.request.urlopen(f"http://127.0.0.1:{head.metrics_port}/metrics", timeout=10).read().decode()
        values = re.findall(
            rf'^{name}{{.*Run="quickstart".*}} (\S+)$|^{name}{{.*run="quickstart".*}} (\S+)$', page, re.M
        )
        found = [float(one or other) for one, other in values if float(one or other) >= 1]
        if found:
            return max(found)
        time.sleep(0.2)
    pytest.fail(f"{name} did not appear on the metrics port")
