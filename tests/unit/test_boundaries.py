"""Exactly at a limit, just below and just above it; counters that must not be swapped."""

import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedppd_ray.runtime.gauges as gauges
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.metrics import ood_auroc
from fedppd_ray.federation.executor import Arrival, Lost
from fedppd_ray.federation.failure_policy import Action, FailurePolicy
from fedppd_ray.federation.round import select_clients
from fedppd_ray.federation.types import Failure, Receipt
from fedppd_ray.inference.abstention import abstention_card, abstention_level
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.student import describe_predictions
from fedppd_ray.runs.export import export_student, read_student
from fedppd_ray.runs.run import evaluate_run
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.seeding import numpy_generator_for
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.serial import SerialClients, SerialExecutor

Tiny = Callable[..., Config]


def distributions(*certainties: float) -> np.ndarray:
    """Log-probabilities of four classes, the first of them this likely."""
    rows = [[certainty, *[(1 - certainty) / 3] * 3] for certainty in certainties]
    return np.log(np.array(rows))


def just_below(value: float) -> float:
    return math.nextafter(value, -math.inf)


# ---- abstention


def card(threshold: float, **more: Any) -> dict[str, Any]:
    return {"classes": list("abcd"), "abstention": {"coverage": 0.9, "threshold": threshold, "table": [], **more}}


def test_an_entropy_at_the_threshold_is_answered_and_one_above_is_not() -> None:
    rows = distributions(0.97, 0.8, 0.5)
    levels = entropy(rows)
    at = describe_predictions(card(float(levels[1])), rows)
    assert [row["abstain"] for row in at] == [False, False, True]
    below = describe_predictions(card(just_below(float(levels[1]))), rows)
    assert [row["abstain"] for row in below] == [False, True, True]
    assert [row["entropy"] for row in at] == levels.tolist()


def test_a_student_without_a_threshold_answers_everything() -> None:
    rows = distributions(0.97, 0.25)
    assert not any(row["abstain"] for row in describe_predictions({**card(0.0), "abstention": None}, rows))


def test_the_calibration_row_at_the_threshold_counts_as_answered() -> None:
    certainties = np.linspace(0.99, 0.3, 10)
    labels = np.where(np.arange(10) == 4, 1, 0)  # the fifth surest is the only one that is wrong
    made = abstention_card(distributions(*certainties), labels, 0.5)
    # The ceil((n + 1) · coverage)-th smallest: the sixth of ten.
    assert made["threshold"] == entropy(distributions(*certainties))[5]
    assert {row["coverage"]: row["risk"] for row in made["table"]}[0.5] == pytest.approx(100 / 6)


TABLE = [{"coverage": level, "threshold": level} for level in (0.5, 0.9, 1.0)]


@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, 0.9), (1e-9, 0.5), (0.5, 0.5), (math.nextafter(0.5, 1), 0.9), (0.9, 0.9), (0.91, 1.0), (1.0, 1.0)],
)
def test_a_coverage_takes_the_lowest_level_that_answers_as_much(asked: float | None, given: float) -> None:
    level = abstention_level(card(0.9, table=TABLE), asked)
    assert level == {"coverage": given, "threshold": given}


@pytest.mark.parametrize("asked", [0.0, -0.1, math.nextafter(1.0, 2)])
def test_a_coverage_that_is_no_share_is_refused(asked: float) -> None:
    with pytest.raises(ConfigError, match="coverage"):
        abstention_level(card(0.9, table=TABLE), asked)


# ---- a round's clients


@pytest.mark.parametrize(("quorum", "selected", "needed"), [(0.5, 3, 2), (0.5, 4, 2), (0.55, 100, 55), (0.01, 5, 1)])
def test_the_quorum_is_the_stated_share_rounded_up(quorum: float, selected: int, needed: int) -> None:
    assert FailurePolicy(0, quorum).needed(selected) == needed


@pytest.mark.parametrize(("retries", "attempts", "action"), [(0, 1, "drop"), (1, 1, "retry"), (1, 2, "drop")])
def test_a_client_has_as_many_second_chances_as_stated(retries: int, attempts: int, action: str) -> None:
    policy = FailurePolicy(retries, 0.5)
    assert policy.on_failure(attempts, late=False).value == action
    assert policy.on_failure(attempts, late=True) is Action.DROP


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.5, 5), (0.94, 9), (0.96, 10), (1.0, 10)])
def test_participation_selects_the_nearest_number_and_at_least_one(share: float, count: int) -> None:
    clients = [f"client-{k:02d}" for k in range(10)]
    selected = select_clients(clients, share, 0, 1)
    assert len(selected) == len(set(selected)) == count
    assert selected == sorted(selected)


def test_a_run_may_be_resumed_for_as_many_rounds_as_it_has(
    tiny: Tiny, train_run: Callable[..., Any], finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = RunStore(run).latest()
    assert train_run(tiny(federation={"rounds": 2}), run, resume=True).records == []
    assert RunStore(run).latest().round == before.round == 2


@pytest.mark.parametrize(("pool", "budget", "trainings"), [(8, 8, 2), (9, 8, 3), (16, 8, 3), (1, 8, 2)])
def test_active_learning_trains_until_the_pool_is_empty(tiny: Tiny, pool: int, budget: int, trainings: int) -> None:
    active = tiny(active={"labelled": 4, "pool": pool, "budget": budget}).active
    assert active is not None
    assert active.trainings == trainings
    active.require_rows(4 + pool, "client-00")
    with pytest.raises(ConfigError, match=f"client-00 holds {3 + pool} rows"):
        active.require_rows(3 + pool, "client-00")


class OneIsLost(SerialExecutor):
    """The real executor; the second client's answers never come."""

    def __init__(self, config: Config, clients: list[str]) -> None:
        super().__init__(config, clients)
        self.clients = AllButOne(ClientWorker(config, clients))


class AllButOne(SerialClients):
    def next_event(self) -> Arrival | Lost:
        event = super().next_event()
        return Lost(event.client, "pulled the plug") if event.client == "client-01" else event


def test_the_record_of_a_round_counts_what_went_down_and_what_came_up(tiny: Tiny, tmp_path: Path, watcher: Any) -> None:
    """In SWAG's last round a client sends five times what it is sent."""
    config = tiny(
        method="fedswag",
        baseline={"rate": 0.02},
        federation={"rounds": 1},
        client={"epochs": 2},
        fedswag={"samples": 1},
    )
    store = RunStore(tmp_path / "run")
    store.create(config)
    Training(config, store, OneIsLost(config, client_ids(3)), watcher).run_rounds(None)
    (record,) = watcher.records
    assert (record["clients"], record["failed"], record["rows"]) == (2, 1, 48)
    model = 21_840 * 4 / 1e6
    assert record["megabytes"] == pytest.approx(3 * model + 2 * (3 + 2) * model, abs=1e-3)


# ---- gauges of a run


class FakeGauge:
    """Ray's gauge without Ray: remembers the last value."""

    values: dict[str, float]

    def __init__(self, name: str, **_: Any) -> None:
        self.name = name

    def set(self, value: float) -> None:
        self.values[self.name.removeprefix("fedppd_")] = value

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"run": "tiny"}


def test_every_gauge_shows_its_own_number(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, float] = {}
    monkeypatch.setattr(FakeGauge, "values", shown, raising=False)
    monkeypatch.setattr(gauges, "Gauge", FakeGauge)
    observer = gauges.GaugeObserver()
    observer.run_started(tiny(federation={"rounds": 7}), 4, [])
    assert shown == {"rounds": 7, "round": 3}
    observer.round_started(4, ["client-00"])
    assert [shown[f"clients_{what}"] for what in ("done", "failed", "dropped")] == [0, 0, 0]
    for _ in range(4):
        observer.client_done(Receipt("client-00", 4, 10))
    for action in (Action.RETRY, Action.RETRY, Action.DROP):
        observer.client_failed(Failure("client-01", "gone"), action)
    assert [shown[f"clients_{what}"] for what in ("done", "failed", "dropped")] == [4, 3, 1]
    record = {"round": 4, "seconds": 2.5, "megabytes": 8.5, "accuracy": 91.0, "ece": 3.0, "nll": 0.4}
    observer.round_finished(record)
    assert {**shown} == {
        "rounds": 7,
        "round": 4,
        "clients_done": 4,
        "clients_failed": 3,
        "clients_dropped": 1,
        "round_seconds": 2.5,
        "megabytes_sent": 8.5,
        "accuracy": 91.0,
        "ece": 3.0,
        "nll": 0.4,
    }
    assert set(gauges.GAUGES) == {f"fedppd_{name}" for name in shown}
    observer.round_finished({**record, "round": 5, "accuracy": None, "ece": None, "nll": None})
    assert (shown["round"], shown["accuracy"]) == (5, 91.0)
    observer.server_lost(6, "killed")
    assert [shown[f"clients_{what}"] for what in ("done", "failed", "dropped")] == [0, 0, 0]
    observer.client_done(Receipt("client-00", 6, 10))
    observer.client_failed(Failure("client-01", "gone"), Action.DROP)
    assert [shown[f"clients_{what}"] for what in ("done", "failed", "dropped")] == [1, 1, 1]


# ---- figures


def test_strangers_are_told_apart_by_the_mean_and_sample_deviation_of_five_draws() -> None:
    inside = distributions(*np.linspace(0.3, 0.99, 40))
    outside = distributions(*np.linspace(0.26, 0.8, 25))
    generator = numpy_generator_for(7, "ood/draws")
    known, strange = entropy(inside), entropy(outside)
    values = []
    for _ in range(5):
        positive, negative = (generator.choice(levels, 25, replace=False) for levels in (strange, known))
        values.append(float(((positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)).mean()))
    assert len(set(values)) > 1  # the test can tell
    mean, deviation = ood_auroc(inside, outside, 7)
    assert mean == pytest.approx(statistics.mean(values), abs=1e-6)
    assert deviation == pytest.approx(statistics.stdev(values), abs=1e-6)


def test_evaluation_answers_the_row_at_the_threshold_too(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    config = RunStore(run).config()
    own, model = read_student(run)
    held_out, predict = HeldOut(config), network_predictor(model)
    known, strange = (np.sort(entropy(held_out.log_probabilities(predict, name))) for name in ("test", "ood"))
    for levels, figure in ((known, "coverage"), (strange, "ood_abstained")):
        place = len(levels) // 3
        abstention = {**own["abstention"], "threshold": float(levels[place])}
        export_student(run, config, own["round"], model, own["metrics"], abstention)
        answered = 100 * (place + 1) / len(levels)
        found = evaluate_run(run).figures["abstention"][figure]
        assert found == pytest.approx(answered if figure == "coverage" else 100 - answered, abs=1e-9)
