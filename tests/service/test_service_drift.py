"""Drift of what a replica is asked: found where real digits change, silent for 24 hours where they do not."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from fedppd_ray.data.parts import Split
from fedppd_ray.inference.drift import drift_card
from fedppd_ray.inference.scores import Floats
from serve.drift import FEWEST_ROWS, Drift
from serve.metrics import Metrics
from serve.settings import Settings
from serve.student import ServedStudent
from tests.service.conftest import Client, npy
from tests.service.live import wait_for

NPY = {"Content-Type": "application/x-npy"}


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def student(digits_run: Path) -> ServedStudent:
    return ServedStudent.load(digits_run, 4096)


@pytest.fixture(scope="module")
def mixed(digits: Any) -> Any:
    """The held-out digits, which come sorted, in random order."""
    order = np.random.default_rng(0).permutation(len(digits.labels))
    return Split(digits.images[order], digits.labels[order])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(run: Path, clock: Clock, told: list[dict[str, Any]], **settings: Any) -> Drift:
    return Drift(Settings(run=str(run), **settings), Metrics(), clock, told.append)


def quarter(drift: Drift, clock: Clock, student: ServedStudent, evidence: Floats, seconds: float = 900) -> str:
    """A quarter of an hour in which these answers were given, in requests of one row."""
    for row in range(len(evidence)):
        drift.note(student, evidence[row : row + 1])
    clock.now += seconds
    drift.step()
    return str(drift.describe(student)["status"])


def test_24_hours_of_digits_like_those_it_knows_are_quiet(
    digits_run: Path, student: ServedStudent, digits: Any, clock: Clock
) -> None:
    """By default: an alarm on at most one day of a hundred."""
    told: list[dict[str, Any]] = []
    drift, seen = watching(digits_run, clock, told), student.log_probabilities(digits.images)
    generator = np.random.default_rng(0)
    states = {quarter(drift, clock, student, seen[generator.choice(len(seen), 150, replace=False)]) for _ in range(96)}
    assert states == {"waiting", "quiet"} or states == {"quiet"}
    assert told == []


def turned(images: Any, _labels: Any) -> Any:
    return np.rot90(images, axes=(2, 3))


def noisy(images: Any, _labels: Any) -> Any:
    noise = np.random.default_rng(1).normal(0, 80, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8)


def few_classes(images: Any, labels: Any) -> Any:
    return images[np.isin(labels, [1, 4, 7])]


@pytest.mark.parametrize("change", [turned, noisy, few_classes])
def test_digits_that_change_are_noticed_in_the_first_window_and_told_once(
    digits_run: Path, student: ServedStudent, mixed: Any, clock: Clock, change: Any
) -> None:
    told: list[dict[str, Any]] = []
    drift = watching(digits_run, clock, told)
    same = student.log_probabilities(mixed.images[:250])
    other = student.log_probabilities(change(mixed.images, mixed.labels)[:250])
    quarter(drift, clock, student, same[:1])  # the export is met
    steps = [quarter(drift, clock, student, rows) for rows in (same, other, other, same, same)]
    assert steps == ["quiet", "drift", "drift", "quiet", "quiet"]
    assert [event["event"] for event in told] == ["drift", "drift_over"]
    assert told[0]["window"]["rows"] == 250
    assert told[0]["model"]["version"] == student.version


def test_the_stated_share_of_days_without_drift_has_an_alarm_at_most(
    digits_run: Path, student: ServedStudent, clock: Clock
) -> None:
    """60 days of 25 looks, each day with calibration rows of its own; an alarm is allowed on one day of five. Binomial,
    one in a million; with the whole level at each look almost every day would have one."""
    generator, days, allowed = np.random.default_rng(3), 60, 0.2
    alarms = 0
    for _ in range(days):
        told: list[dict[str, Any]] = []
        drift = watching(digits_run, clock, told, drift_seconds=3600, drift_false_alarms=allowed)
        own = _Recorded(student, drift_card(_answers(300, generator), 0))
        for _ in range(25):
            quarter(drift, clock, own, _answers(150, generator), 3600)  # type: ignore[arg-type]
        alarms += any(event["event"] == "drift" for event in told)
    assert alarms <= binom.ppf(1 - 1e-6, days, allowed)


class _Recorded:
    """A student with another record of its calibration rows."""

    def __init__(self, student: ServedStudent, record: dict[str, Any]) -> None:
        self.card = {**student.card, "drift": record}
        self.version, self.reference = student.version, student.reference


def _answers(rows: int, generator: np.random.Generator) -> Floats:
    logits = generator.normal(0, 3, (rows, 10))
    return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def test_few_rows_are_waited_for_and_another_export_begins_anew(
    digits_run: Path, student: ServedStudent, mixed: Any, clock: Clock
) -> None:
    drift = watching(digits_run, clock, [])
    seen = student.log_probabilities(mixed.images[:200])
    assert quarter(drift, clock, student, seen[: FEWEST_ROWS - 1]) == "waiting"
    assert drift.describe(student)["window_rows"] == FEWEST_ROWS - 1
    assert quarter(drift, clock, student, seen[:1]) == "quiet"
    other = ServedStudent.load(digits_run, 4096)
    quarter(drift, clock, other, seen[:5])
    assert (drift.describe(other)["status"], drift.describe(other)["window_rows"]) == ("waiting", 5)


def test_what_waits_to_be_counted_is_bounded(digits_run: Path, student: ServedStudent, clock: Clock) -> None:
    drift = watching(digits_run, clock, [])
    rows = student.log_probabilities(np.zeros((500, 1, 28, 28), np.uint8))
    for _ in range(1000):
        drift.note(student, rows)
    assert sum(len(evidence) for _, evidence in drift._waiting) < 10_000
    drift.step()
    assert drift.describe(student)["window_rows"] == 5000
    assert not drift._waiting


def test_the_service_tells_by_route_metric_and_webhook(open_client: Client, digits_run: Path, digits: Any) -> None:
    received: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = open_client(digits_run, drift_seconds=1, drift_webhook=f"http://127.0.0.1:{server.server_port}/alarm")
    assert client.get("/drift").json()["status"] == "waiting"

    def asked() -> bool:
        sideways = np.rot90(digits.images[:300, 0], axes=(1, 2))
        assert client.post("/predict", content=npy(sideways), headers=NPY).status_code == 200
        return bool(client.get("/drift").json()["status"] == "drift")

    wait_for(asked, 60)
    found = client.get("/drift").json()
    assert found["calibration_rows"] == 400
    assert set(found["last"]["tests"]) == {"entropy", "classes", "projections"}
    assert "fedppd_drift 1.0" in client.get("/metrics").text
    assert 'fedppd_drift_statistic{test="entropy"}' in client.get("/metrics").text
    wait_for(lambda: bool(received), 30)
    assert received[0]["event"] == "drift"
    server.shutdown()


def test_an_export_without_a_record_is_not_judged(open_client: Client, colour_run: Path) -> None:
    assert open_client(colour_run).get("/drift").json()["status"] == "unknown"
