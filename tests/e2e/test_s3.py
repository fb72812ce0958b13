"""A run in object storage, against a real S3 API on loopback: the whole cluster may vanish between two rounds."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from fedppd_ray.runs import remote
from tests.e2e.conftest import ROOT, SMALL, command, fedppd, student_digest, train, wait_for
from tests.service.live import HEADERS, fedppd_serve

ROUNDS = 3
BUCKET = "fedppd-runs"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


class Storage:
    """The bucket, seen past our own code."""

    def __init__(self, endpoint: str, temporary: Path) -> None:
        self.endpoint = endpoint
        self.temporary = temporary
        self.client = boto3.client("s3", endpoint_url=endpoint)

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def keys(self, prefix: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [entry["Key"].removeprefix(prefix) for entry in found]

    def rounds(self, run: str) -> list[int]:
        if "metrics.jsonl" not in self.keys(f"{run}/"):
            return []
        return [json.loads(line)["round"] for line in self.read(f"{run}/metrics.jsonl").splitlines()]

    def student_digest(self, run: str) -> str:
        return hashlib.sha256(self.read(f"{run}/student/student.safetensors")).hexdigest()

    def check_keys(self, after: str) -> None:
        """After that many calls ("0", "inf"), an unknown access key is refused."""
        httpx.post(f"{self.endpoint}/moto-api/reset-auth", content=after, timeout=10).raise_for_status()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    temporary = tmp_path_factory.mktemp("tmp")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        host, port = server.get_host_and_port()
        settings = KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (settings | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}).items():
            patch.setenv(name, value)
        remote._s3_files.cache_clear()
        made = Storage(settings["AWS_ENDPOINT_URL"], temporary)
        made.client.create_bucket(Bucket=BUCKET)
        yield made
    remote._s3_files.cache_clear()
    server.stop()


@pytest.fixture(autouse=True)
def temporary_folder(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone, to see what stays there. (Ray's sockets need short paths: `fedppd serve` gets another.)"""
    monkeypatch.setenv("TMPDIR", str(storage.temporary))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rounds in one go, on disk."""
    out = tmp_path_factory.mktemp("local") / "run"
    done = train(out, "--serial", rounds=ROUNDS)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def resumed(storage: Storage) -> str:
    """Two rounds in one process, the third in another, which has nothing but the URL."""
    url = f"s3://{BUCKET}/team/run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(storage.temporary))
        first = train(url, "--serial", rounds=2)
        assert first.returncode == 0, first.stdout + first.stderr
        assert list(storage.temporary.glob("fedppd-run-*")) == []
        assert storage.rounds("team/run") == [1, 2]
        second = train(url, "--serial", "--resume", rounds=ROUNDS)
        assert second.returncode == 0, second.stdout + second.stderr
    assert f"report: {url}/report.html" in second.stdout
    return url


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error as users meet it."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.usefixtures("resumed")
def test_two_rounds_and_a_third_from_the_url_alone_equal_three_on_disk(storage: Storage, local: Path):
    assert storage.student_digest("team/run") == student_digest(local)
    assert storage.rounds("team/run") == [1, 2, 3]


@pytest.mark.usefixtures("resumed")
def test_a_run_in_storage_holds_what_a_folder_holds(storage: Storage, local: Path):
    on_disk = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
    assert set(storage.keys("team/run/")) == on_disk - {".lock"}


@pytest.mark.long
def test_evaluate_says_the_same_of_both(resumed: str, local: Path):
    there, here = (fedppd("evaluate", run, "--json") for run in (resumed, local))
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout) == json.loads(here.stdout)


@pytest.mark.long
def test_predict_says_the_same_of_both(resumed: str, local: Path, tmp_path: Path):
    image = tmp_path / "digit.png"
    assert fedppd("data", "sample", "mnist5k", image).returncode == 0
    there, here = (fedppd("predict", run, image, "--json") for run in (resumed, local))
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout) == json.loads(here.stdout)


@pytest.mark.long
def test_the_report_can_be_made_again(storage: Storage, resumed: str):
    for key in ("report.html", "plots/convergence.png"):
        storage.client.delete_object(Bucket=BUCKET, Key=f"team/run/{key}")
    done = fedppd("report", resumed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{resumed}/report.html"
    assert storage.read("team/run/report.html").count(b"data:image/png;base64") == 4
    assert storage.read("team/run/plots/convergence.png").startswith(b"\x89PNG")


@pytest.mark.long
def test_a_second_run_at_the_same_url_is_refused(resumed: str):
    line = one_line(train(resumed, "--serial", rounds=ROUNDS))
    assert line.startswith(f"fedppd: {resumed} already holds a run; continue it with --resume")


def test_kill_9_and_a_retry_of_the_same_command_give_the_same_bits(storage: Storage, local: Path):
    url = f"s3://{BUCKET}/killed"
    options = ["--serial", "--resume-if-exists"]
    rounds = ["--set", f"federation.rounds={ROUNDS}"]
    arguments = ["train", "configs/quickstart.yaml", "--out", url, *SMALL, *rounds, *options]
    driver = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(storage.rounds("killed")) >= 1, 90, "round 1")
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    again = fedppd(*arguments)
    assert again.returncode == 0, again.stderr
    assert f"rounds 1 to {ROUNDS}" not in again.stdout
    assert storage.student_digest("killed") == student_digest(local)
    assert storage.rounds("killed") == [1, 2, 3]
    finished = fedppd(*arguments)  # a retry that comes too late
    assert finished.returncode == 0, finished.stderr
    assert storage.rounds("killed") == [1, 2, 3]


@pytest.mark.long
def test_resume_if_exists_works_on_disk_too(tmp_path: Path, local: Path):
    for rounds in (1, ROUNDS):
        done = train(tmp_path / "run", "--serial", "--resume-if-exists", rounds=rounds)
        assert done.returncode == 0, done.stderr
    assert student_digest(tmp_path / "run") == student_digest(local)


# ---- serving


@pytest.mark.long
def test_a_served_student_is_swapped_for_a_newer_export(storage: Storage, resumed: str):
    from serve.metrics import Metrics
    from serve.predictor import Predictor
    from serve.settings import Settings

    predictor = Predictor(Settings(run=resumed, watch=True), Metrics())
    try:
        assert predictor.current.round == ROUNDS
        assert predictor.refresh() is False
        card = storage.read("team/run/student/model.json")
        put(storage, "team/run/student/model.json", json.dumps(json.loads(card) | {"version": "9-new"}).encode())
        assert predictor.refresh() is True
        assert predictor.current.version == "9-new"
        put(storage, "team/run/student/model.json", card)
        assert predictor.refresh() is True
    finally:
        predictor.close()


def put(storage: Storage, key: str, content: bytes) -> None:
    storage.client.put_object(Bucket=BUCKET, Key=key, Body=content)


def test_fedppd_serve_answers_from_a_url_and_follows_it(
    storage: Storage, resumed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TMPDIR")
    run: Any = resumed
    card = json.loads(storage.read("team/run/student/model.json"))
    body = {"instances": [[[0] * 28] * 28]}

    def version() -> str:
        answer = httpx.post(f"{server.url}/predict", json=body, headers=HEADERS, timeout=30)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["model"]["version"])

    with fedppd_serve(run, tmp_path / "log", "--watch") as server:
        assert version() == card["version"]
        put(storage, "team/run/student/model.json", json.dumps(card | {"version": "9-new"}).encode())
        try:
            wait_for(lambda: version() == "9-new", 30, "the reload")
        finally:
            put(storage, "team/run/student/model.json", json.dumps(card).encode())


# ---- errors


@pytest.mark.parametrize("arguments", [("evaluate",), ("report",)])
@pytest.mark.long
def test_a_missing_bucket_is_one_line(arguments: tuple[str, ...]):
    assert one_line(fedppd(*arguments, "s3://no-such-bucket/run")) == (
        "fedppd: s3://no-such-bucket/run: no such bucket; create it, or mend the URL"
    )


@pytest.mark.long
def test_training_into_a_missing_bucket_stops_before_it_starts():
    assert "no such bucket" in one_line(train("s3://no-such-bucket/run", rounds=1))


@pytest.mark.long
def test_a_url_without_a_run_is_one_line():
    url = f"s3://{BUCKET}/nothing"
    assert one_line(fedppd("evaluate", url)) == f"fedppd: {url} is no run folder: it has no config.yaml"
    assert "holds no run to resume" in one_line(train(url, "--serial", "--resume", rounds=1))


def test_wrong_credentials_are_one_line(storage: Storage, resumed: str):
    storage.check_keys("0")
    try:
        for run in (fedppd("evaluate", resumed), train(resumed, "--serial", "--resume", rounds=ROUNDS)):
            line = one_line(run)
            assert line.startswith(f"fedppd: {resumed}: access denied (")
            assert "AWS_ACCESS_KEY_ID" in line
    finally:
        storage.check_keys("inf")


@pytest.mark.long
def test_no_credentials_are_one_line(resumed: str, monkeypatch: pytest.MonkeyPatch):
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    line = one_line(fedppd("evaluate", resumed))
    assert line.startswith(f"fedppd: {resumed}: no credentials; check AWS_ACCESS_KEY_ID")


def test_an_endpoint_that_nobody_answers_at_is_one_line_within_seconds(resumed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    began = time.monotonic()
    line = one_line(fedppd("evaluate", resumed))
    assert time.monotonic() - began < 60
    assert line.startswith(f"fedppd: {resumed}: cannot be reached (")
    assert "http://127.0.0.1:1/" in line
    assert line.endswith("check the network and AWS_ENDPOINT_URL")
