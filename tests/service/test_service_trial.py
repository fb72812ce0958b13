"""A registry served: current is followed, a candidate is tried beside it and promoted or rolled back, unnoticed."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.errors import CheckpointError
from fedppd_ray.releases.live import LiveGates
from fedppd_ray.releases.promotion import Trial, Wish, promote, rollback
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import Candidate
from fedppd_ray.runs.export import export_student, read_student
from fedppd_ray.runs.store import RunStore
from serve.comparing import MOST_WAITING, Comparing
from serve.metrics import Counter as Counting
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from serve.student import ServedStudent
from serve.trial import Running
from tests.service.conftest import Client
from tests.service.exports import calibration_of, export_again, untrained_colour
from tests.service.live import wait_for

OPEN = "offline: {accuracy: {at_least: 50}}\nlive: {requests: 20, latency: null}\n"
SHADOW, CANARY = Trial("shadow", 1.0), Trial("canary", 1.0)


class Shelf:
    """A registry, and runs to promote to it."""

    def __init__(self, folder: Path, digits_run: Path) -> None:
        self.folder = folder / "registry"
        self._work = folder
        self._digits = digits_run
        self._runs = 0
        (folder / "gates.yaml").write_text(OPEN)

    @property
    def registry(self) -> Registry:
        return Registry.open_or_create(self.folder)

    def run(self, change: Callable[[Path], object] | None = None) -> Path:
        """A copy of the digits' run whose student is a little different, or changed as told."""
        self._runs += 1
        run = Path(shutil.copytree(self._digits, self._work / f"run{self._runs}"))
        export_again(run, 1 + self._runs)
        if change:
            change(run)
        return run

    def promote(self, run: Path, trial: Trial | None = None, **more: Any) -> str:
        verdict = promote(run, self.registry, Wish("ada", self._work / "gates.yaml", trial, **more))
        assert verdict.let_through
        return verdict.version


@pytest.fixture
def shelf(tmp_path: Path, digits_run: Path) -> Shelf:
    return Shelf(tmp_path, digits_run)


def served(client: Any, digits: Any, count: int = 1, offset: int = 0) -> Counter[str]:
    """Versions that answered, one request each; every request must be answered."""
    seen: Counter[str] = Counter()
    for number in range(count):
        image = digits.images[(offset + number) % 500, 0].tolist()
        answer = client.post("/predict", json={"instances": [image]}, headers={"X-Request-Id": f"r{number}"})
        assert answer.status_code == 200, answer.text
        seen[answer.json()["model"]["version"]] += 1
    return seen


def card_version(registry: Registry, version: str) -> str:
    return str(json.loads((Path(registry.folder_of(version)) / "student" / "model.json").read_text())["version"])


def served_until(client: Any, digits: Any, condition: Callable[[], bool], seconds: float = 60) -> Counter[str]:
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        seen += served(client, digits, 5)
    return seen


FAST = {"poll_seconds": 0.05, "trial_budget": 1.0}


def test_current_is_followed_without_being_told_to_watch(shelf: Shelf, open_client: Client, digits: Any) -> None:
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    assert served(client, digits) == {card_version(shelf.registry, first): 1}
    assert client.get("/model").json()["reload"]["watching"] is True
    second = card_version(shelf.registry, shelf.promote(shelf.run()))
    wait_for(lambda: client.get("/model").json()["version"] == second, 20)
    rollback(shelf.registry, "ada", "")
    wait_for(lambda: client.get("/model").json()["version"] == card_version(shelf.registry, first), 20)


def test_an_empty_registry_is_not_served(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    assert shelf.registry.state().current is None
    with pytest.raises(CheckpointError, match="nothing is current"):
        Predictor(Settings(run=str(shelf.folder)), Metrics())


def test_a_version_that_was_changed_in_place_is_not_served(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    first = shelf.promote(shelf.run())
    predictor = Predictor(Settings(run=str(shelf.folder)), Metrics())
    second = shelf.promote(shelf.run())
    card = Path(shelf.registry.folder_of(second)) / "student" / "model.json"
    card.write_text(card.read_text().replace('"name": "digits"', '"name": "others"'))
    assert predictor.refresh() is False
    assert predictor.current.version == card_version(shelf.registry, first)
    assert "not what was registered" in str(predictor.state.error)


def test_one_that_does_the_same_in_shadow_is_promoted(shelf: Shelf, open_client: Client, digits: Any) -> None:
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    second = shelf.promote(shelf.run(), SHADOW)
    seen = served_until(client, digits, lambda: shelf.registry.state().current == second)
    assert set(seen) <= {card_version(shelf.registry, version) for version in (first, second)}
    entry = shelf.registry.entries()[-1]
    assert (entry.what, entry.version) == ("promoted", second)
    assert entry.who.startswith("service@")
    assert "disagreement 0.00 %" in entry.why
    assert 'fedppd_trial_decisions_total{decision="promoted"} 1.0' in client.get("/metrics").text
    wait_for(lambda: client.get("/model").json()["trial"] is None, 20)


def contrary(run: Path) -> None:
    """Sees what the other sees, and says the next class; the gates are forced."""
    card, model = read_student(run)
    tensors = dict(model.module.named_parameters())
    for name in ("out.weight", "out.bias"):
        tensors[name].data.copy_(tensors[name].data.roll(1, 0))
    config = RunStore(run).config()
    export_student(run, config, card["round"], model, card["metrics"], card["abstention"], calibration_of(card))


def test_a_shadow_is_never_returned_and_one_that_disagrees_is_rolled_back(
    shelf: Shelf, open_client: Client, digits: Any
) -> None:
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    second = shelf.promote(shelf.run(contrary), SHADOW, force=True, reason="a test")
    seen = served_until(client, digits, lambda: shelf.registry.state().candidate is None)
    seen += served(client, digits, 10)
    assert set(seen) == {card_version(shelf.registry, first)}
    assert shelf.registry.state().current == first
    entry = shelf.registry.entries()[-1]
    assert (entry.what, entry.version) == ("rolled back", second)
    assert "disagreement 100.00 %" in entry.why
    assert "fedppd_trial_disagreement_percent 100.0" in client.get("/metrics").text


def test_a_canary_answers_its_share_by_the_requests_id(shelf: Shelf, open_client: Client, digits: Any) -> None:
    (shelf.folder.parent / "gates.yaml").write_text(OPEN.replace("20", "100000"))
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    second = shelf.promote(shelf.run(), Trial("canary", 0.25))
    wait_for(lambda: client.get("/model").json()["trial"] is not None, 20)
    old, new = (card_version(shelf.registry, version) for version in (first, second))
    seen = served(client, digits, 200)
    # Which of these ids are the candidate's is fixed; over all ids it is a quarter.
    assert seen == served(client, digits, 200)
    assert 0.12 < seen[new] / 200 < 0.4
    assert seen[old] + seen[new] == 200
    assert shelf.registry.state().current == first
    assert "fedppd_canary_requests_total" in client.get("/metrics").text


def test_the_share_is_a_share_of_all_ids(digits_run: Path, shelf: Shelf) -> None:
    shelf.promote(shelf.run())
    shelf.promote(shelf.run(), Trial("canary", 0.1))
    candidate = shelf.registry.state().candidate
    assert candidate is not None
    running = Running(candidate, ServedStudent.load(digits_run, 10))
    taken = sum(running.takes(f"request-{number}") for number in range(20_000))
    # Binomial(20,000, 0.1): five standard deviations are 212.
    assert abs(taken - 2000) < 212


def test_a_canary_that_fails_is_noticed_by_nobody_but_the_log(
    shelf: Shelf, open_client: Client, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.promote(shelf.run())
    old = card_version(shelf.registry, first)
    client = open_client(shelf.folder, **FAST)
    sound = ServedStudent.log_probabilities

    def failing(self: ServedStudent, values: Any) -> Any:
        if self.version != old and values.any():  # black images are what a student is warmed up with
            raise RuntimeError("a kernel that this processor does not have")
        return sound(self, values)

    monkeypatch.setattr(ServedStudent, "log_probabilities", failing)
    second = shelf.promote(shelf.run(), CANARY)
    seen = served_until(client, digits, lambda: shelf.registry.state().candidate is None)
    assert set(seen) == {old}
    entry = shelf.registry.entries()[-1]
    assert (entry.what, entry.version) == ("rolled back", second)
    assert "failed" in entry.why
    assert 'status="500"' not in client.get("/metrics").text


def test_a_callers_mistake_is_no_failure_of_the_canary(shelf: Shelf, open_client: Client) -> None:
    shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    shelf.promote(shelf.run(), CANARY)
    wait_for(lambda: client.get("/model").json()["trial"] is not None, 20)
    for _ in range(5):
        assert client.post("/predict?coverage=2", json={"instances": [[[1]]]}).status_code == 422
        assert client.post("/predict", json={"instances": [[[1]]]}).status_code == 422
    time.sleep(0.3)
    assert shelf.registry.state().candidate is not None


def test_a_candidate_of_other_inputs_is_rolled_back_at_once(
    shelf: Shelf, open_client: Client, digits: Any, tmp_path: Path
) -> None:
    shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    colours = tmp_path / "colours"
    untrained_colour(colours)
    registry = shelf.registry
    version = registry.stage(colours)
    registry.seal(version, {}, colours, "ada")

    def tried(state: Any) -> Any:
        return state.with_candidate(
            Candidate(version=version, mode="shadow", share=1.0, live=LiveGates(), since="2026-01-31T12:00:00+00:00")
        )

    registry.move(tried, who="eve", what="candidate", version=version, why="around the gates")
    wait_for(lambda: registry.state().candidate is None, 20)
    assert "other inputs" in registry.entries()[-1].why
    served(client, digits)


def test_one_that_waits_gets_no_traffic_and_no_decision(shelf: Shelf, open_client: Client, digits: Any) -> None:
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)
    second = shelf.promote(shelf.run(), Trial("wait", 0.0))
    wait_for(lambda: client.get("/model").json()["trial"] is not None, 20)
    assert set(served(client, digits, 60)) == {card_version(shelf.registry, first)}
    time.sleep(0.3)
    candidate = shelf.registry.state().candidate
    assert candidate is not None
    assert candidate.version == second


def test_a_registry_that_cannot_be_written_ends_the_trial_here(
    shelf: Shelf, open_client: Client, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only mount: what must not be returned is not, and the metrics say that nobody was told."""
    first = shelf.promote(shelf.run())
    client = open_client(shelf.folder, **FAST)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "audit.jsonl")

    shelf.promote(shelf.run(contrary), CANARY, force=True, reason="a test")
    monkeypatch.setattr(Registry, "move", denied)
    told = 'fedppd_trial_decisions_total{decision="not written"} 1.0'
    served_until(client, digits, lambda: told in client.get("/metrics").text)
    assert set(served(client, digits, 20)) == {card_version(shelf.registry, first)}


def test_what_does_not_fit_the_queue_is_dropped_and_counted() -> None:
    dropped = Counting("dropped", "", [])
    comparing = Comparing(lambda: None, 1.0, dropped)  # not started: nobody takes anything out
    for _ in range(MOST_WAITING + 7):
        comparing.offer(np.zeros((4096, 1, 28, 28), np.uint8))
    assert dropped.totals(lambda _: True) == {(): 7}
    kept = list(comparing._waiting)
    assert len(kept) == MOST_WAITING
    assert max(rows.nbytes for rows in kept) <= 256 * 1024
    assert all(rows.base is None for rows in kept), "a view keeps the whole body in memory"
