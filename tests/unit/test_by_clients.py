"""Prediction sets and the OOD flag from rows that stay at the clients: those of the same rows in one place."""

from pathlib import Path

import numpy as np
import pytest

from fedppd_ray import Run, train
from fedppd_ray.config.conformal import ConformalConfig
from fedppd_ray.config.file import parse_config
from fedppd_ray.data.datasets import load
from fedppd_ray.evaluation.by_clients import sets_of_clients
from fedppd_ray.evaluation.federated import Ask
from fedppd_ray.evaluation.sets import calibrated_sets
from fedppd_ray.inference.conformal import BINS
from fedppd_ray.inference.questions import Question, answer_to, question_of
from fedppd_ray.inference.scores import Floats, Labels, Outputs
from fedppd_ray.inference.temperature import scaled
from tests.unit.test_conformal import predictions

CLASSES = list("012345")


def clients(log_p: Floats, labels: Labels, count: int = 5) -> Ask:
    """Each with every fifth row; questions travel as data."""

    def ask(question: Question) -> dict[str, dict[str, np.ndarray]]:
        told = question_of(question.told())
        found = {f"client-{at}": answer_to(told, Outputs(log_p[at::count]), labels[at::count]) for at in range(count)}
        return {client: dict(answer) for client, answer in found.items() if answer is not None}

    return ask


def limits(row: dict[str, list[float | None]]) -> Floats:
    """One for each class."""
    return np.broadcast_to([np.inf if t is None else t for t in row["thresholds"]], 6)


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("shares", [None, {"0": 0.5, **dict.fromkeys("12345", 0.1)}])
def test_the_sets_are_those_of_all_rows_in_one_place_or_a_bin_larger(
    method: str, shares: dict[str, float] | None
) -> None:
    log_p, labels = predictions(900)
    config = ConformalConfig.model_validate({"method": method, "shares": shares})
    found = sets_of_clients(config, CLASSES, 1.7, clients(log_p, labels))
    exact = calibrated_sets(config, scaled(log_p, 1.7), labels, CLASSES, ())
    assert found is not None
    assert (found["rows"], found["source"], found["guarantee"]) == (900, "clients", "marginal")
    assert found["resolution"] <= 1.6 / BINS
    assert [row["confidence"] for row in found["table"]] == [row["confidence"] for row in exact["table"]]
    for ours, theirs in zip(found["table"], exact["table"], strict=True):
        low, high = limits(theirs), limits(ours)
        assert (high >= low).all()
        assert (high[np.isfinite(low)] <= low[np.isfinite(low)] + found["resolution"] + 1e-6).all()
    assert found["coverage"]["coverage"] >= exact["coverage"]["coverage"]
    assert set(found["coverage"]["sites"]) == {f"client-{at}" for at in range(5)}
    assert sum(site["rows"] for site in found["coverage"]["sites"].values()) == 900


def test_where_nobody_keeps_enough_rows_back_there_are_no_sets() -> None:
    log_p, labels = predictions(40)
    assert sets_of_clients(ConformalConfig(), CLASSES, 1.0, clients(log_p, labels)) is None  # 8 rows each


def test_a_run_whose_rows_are_all_at_clients_has_a_temperature_and_sets(tmp_path: Path) -> None:
    digits = load("mnist5k", None).train
    order = np.random.default_rng(0).permutation(len(digits))
    names = ["client-00", "client-01"]
    for at, name in enumerate(names):
        (tmp_path / name).mkdir()
        rows = order[at:400:2]
        np.save(tmp_path / name / "images.npy", digits.images[rows, 0])
        np.save(tmp_path / name / "labels.npy", digits.labels[rows])
    config = parse_config(
        {
            "data": {"name": "mnist5k", "calibration": 0.3, "partition": {"kind": "folders"}},
            "federation": {"clients": 2, "rounds": 1},
            "clients": {name: {"data": str(tmp_path / name)} for name in names},
            "evaluation": {"ood": None},
        }
    )
    run: Run = train(config, tmp_path / "run", serial=True)
    card = run.card()
    assert card["temperature"] != 1
    assert card["conformal"]["source"] == "clients"
    assert card["conformal"]["rows"] == card["ood"]["rows"] == 120
    assert card["ood"]["threshold"] > 0
    figures = run.evaluate()["sets"]
    assert figures["source"] == "clients"
    # 120 calibration rows, 1,000 test rows: less than one in a million is so far below.
    assert figures["coverage"] > 75
