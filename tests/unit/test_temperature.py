"""One temperature, fitted where the NLL is smallest, and applied wherever the student answers."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.config.schema import Config
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.scores import Floats, Labels, entropy
from fedppd_ray.inference.student import Student
from fedppd_ray.inference.temperature import COLDEST, HOTTEST, fit_temperature, nll_slope, scaled, temperature_by
from fedppd_ray.methods import build_method
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.run import evaluate_run
from fedppd_ray.runs.store import RunStore


def over_confident(rows: int, seed: int) -> tuple[Floats, Labels]:
    """Labels drawn from softmax(z), predictions softmax(3 z)."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1.5, (rows, 5))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([generator.choice(5, p=row) for row in p])
    return scaled(np.log(p), 1 / 3), labels


@pytest.mark.parametrize(("right", "logit"), [(80, 5.0), (60, 2.0), (95, 1.0)])
def test_two_classes_of_one_confidence_end_at_their_accuracy(right: int, logit: float) -> None:
    """σ(a/T) = q, so T = a / log(q/(1−q))."""
    log_p = np.log(np.tile([1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(logit))], (100, 1)))
    labels = np.array([0] * right + [1] * (100 - right))
    wanted = logit / math.log(right / (100 - right))
    assert fit_temperature(log_p, labels) == pytest.approx(wanted, rel=1e-9)
    assert metrics_of(scaled(log_p, wanted), labels).ece == pytest.approx(0, abs=1e-9)


def test_a_known_over_confidence_is_found() -> None:
    assert fit_temperature(*over_confident(20_000, 0)) == pytest.approx(3, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 60), st.integers(0, 999))
def test_no_other_temperature_has_a_lower_nll(rows: int, seed: int) -> None:
    log_p, labels = over_confident(rows, seed)
    best = fit_temperature(log_p, labels)
    lowest = metrics_of(scaled(log_p, best), labels).nll
    for other in (COLDEST, 0.9 * best, 0.99 * best, 1, 1.01 * best, 1.1 * best, HOTTEST):
        assert lowest <= metrics_of(scaled(log_p, min(max(other, COLDEST), HOTTEST)), labels).nll + 1e-9


def test_temperature_1_changes_no_bit_and_every_temperature_leaves_the_answers() -> None:
    log_p, _ = over_confident(50, 1)
    assert scaled(log_p, 1) is log_p
    hot = scaled(log_p, 7.0)
    np.testing.assert_allclose(np.exp(hot).sum(axis=1), 1)
    assert np.array_equal(hot.argmax(axis=1), log_p.argmax(axis=1))
    assert (entropy(hot) > entropy(log_p)).all()


def test_rows_in_two_places_need_only_their_sums() -> None:
    log_p, labels = over_confident(90, 2)

    def together(beta: float) -> float:
        return nll_slope(log_p[:40], labels[:40], beta) + nll_slope(log_p[40:], labels[40:], beta)

    assert temperature_by(together) == pytest.approx(fit_temperature(log_p, labels), rel=1e-9)


def test_without_rows_it_is_1_and_without_a_wrong_answer_it_is_bounded() -> None:
    assert fit_temperature(np.empty((0, 3)), np.empty(0, np.int64)) == 1
    log_p = np.log(np.tile([0.7, 0.2, 0.1], (4, 1)))
    assert fit_temperature(log_p, np.zeros(4, np.int64)) == pytest.approx(COLDEST)


def test_an_impossible_class_does_not_spoil_it() -> None:
    log_p = np.log(
        np.array([[0.8, 0.2, 0.0], [0.9, 0.1, 0.0]]) + 0.0, where=[[1, 1, 0]] * 2, out=np.full((2, 3), -np.inf)
    )
    assert math.isfinite(fit_temperature(log_p, np.array([0, 1])))


# ---- in a run


def test_the_export_has_the_temperature_of_its_calibration_rows(finished_run: Path) -> None:
    config, (card, model) = RunStore(finished_run).config(), read_student(finished_run)
    held_out = HeldOut(config)
    known = held_out.log_probabilities(network_predictor(model), "calibration")
    assert card["temperature"] == fit_temperature(known, held_out.labels("calibration")) != 1
    served = entropy(scaled(known, card["temperature"]))
    assert (served <= card["abstention"]["threshold"]).sum() == math.ceil(0.95 * (len(known) + 1))


def test_the_student_answers_at_the_cards_temperature_and_without_one_at_1(finished_run: Path) -> None:
    config, (card, model) = RunStore(finished_run).config(), read_student(finished_run)
    rows = np.asarray(HeldOut(config).images("test")[:20])
    raw = HeldOut(config).outputs(network_predictor(model), rows).log_probabilities
    np.testing.assert_allclose(
        Student(card, model).log_probabilities(rows), scaled(raw, card["temperature"]), atol=1e-6
    )
    del card["temperature"]
    np.testing.assert_allclose(Student(card, model).log_probabilities(rows), raw, atol=1e-6)


def test_raw_and_scaled_figures_stand_side_by_side(finished_run: Path) -> None:
    seen = evaluate_run(finished_run)
    card, _ = read_student(finished_run)
    at = scaled(seen.log_probabilities, card["temperature"])
    assert seen.figures["nll"] == metrics_of(seen.log_probabilities, seen.labels).nll
    assert seen.figures["scaled"]["nll"] == metrics_of(at, seen.labels).nll
    assert seen.figures["scaled"]["accuracy"] == seen.figures["accuracy"]
    assert seen.figures["scaled"]["nll"] != seen.figures["nll"]
    answered = entropy(at) <= card["abstention"]["threshold"]
    assert seen.figures["abstention"]["coverage"] == pytest.approx(100 * answered.mean())
    json.dumps(seen.figures, allow_nan=False)


def test_without_calibration_rows_nothing_is_scaled(
    tiny: Callable[..., Config], train_run: Callable[..., object], tmp_path: Path
) -> None:
    config = tiny(method="fedavg", federation={"rounds": 1}, data={"calibration": 0}, evaluation={"ood": None})
    train_run(config, tmp_path / "run")
    card, _ = read_student(tmp_path / "run")
    figures = evaluate_run(tmp_path / "run").figures
    assert (card["temperature"], card["abstention"], card["score"]) == (1.0, None, "entropy")
    assert figures["scaled"]["ece"] == figures["ece"]
    assert "calibration_nll" not in RunStore(tmp_path / "run").history()[0]


def test_a_round_records_its_calibration_nll_and_its_teachers_accuracy(finished_run: Path) -> None:
    store = RunStore(finished_run)
    config, last = store.config(), store.history()[-1]
    held_out, method = HeldOut(config), build_method(config)
    models = store.latest().models
    known = held_out.log_probabilities(method.predictor(models), "calibration")
    assert last["calibration_nll"] == metrics_of(known, held_out.labels("calibration")).nll
    teacher = method.teacher(models)
    assert teacher is not None
    seen = held_out.log_probabilities(network_predictor(teacher), "test")
    assert last["teacher_accuracy"] == metrics_of(seen, held_out.labels("test")).accuracy
    assert evaluate_run(finished_run).figures["teacher_accuracy"] == last["teacher_accuracy"]
    assert last["teacher_accuracy"] != last["accuracy"]
