"""Metrics against hand-computed examples, torchmetrics and naive definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.evaluation.metrics import auroc, metrics_of, misclassification_auroc, ood_auroc, reliability
from fedppd_ray.inference.scores import entropy
from fedppd_ray.models.torchvision_import import import_torchvision

import_torchvision()  # torchmetrics imports it where it is installed
from torchmetrics.functional.classification import (  # noqa: E402
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)


def logs(rows: list[list[float]]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float64))


def predictions(rows: int = 3000, classes: int = 7, seed: int = 0, scale: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Random log-probabilities with labels drawn so that some are right."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, scale, (rows, classes))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = np.array([generator.choice(classes, p=np.exp(0.6 * row) / np.exp(0.6 * row).sum()) for row in logits])
    return log_p, labels


# ---- by hand


def test_a_small_example_by_hand() -> None:
    log_p = logs([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    labels = np.array([0, 1, 1, 0])
    result = metrics_of(log_p, labels)
    assert result.accuracy == pytest.approx(50.0)
    assert result.nll == pytest.approx(-(math.log(0.9) + math.log(0.1) + math.log(0.7) + math.log(0.45)) / 4)
    # Bins of 1/15: 0.9 twice (half right), 0.7 (right), 0.55 (wrong).
    assert result.ece == pytest.approx(100 * (2 * 0.4 + 0.3 + 0.55) / 4)
    assert result.mce == pytest.approx(55.0)
    assert result.brier == pytest.approx((2 * 0.1**2 + 2 * 0.9**2 + 2 * 0.3**2 + 2 * 0.55**2) / 4)


def test_certainty_that_is_right_is_perfect() -> None:
    result = metrics_of(logs([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1]))
    assert result.as_dict() == {"accuracy": 100.0, "nll": 0.0, "ece": 0.0, "mce": 0.0, "brier": 0.0}


def test_certainty_that_is_wrong_is_as_bad_as_can_be() -> None:
    result = metrics_of(logs([[1.0, 1e-300]]), np.array([1]))
    assert (result.accuracy, result.ece, result.mce) == (0.0, 100.0, 100.0)
    assert result.brier == pytest.approx(2.0)
    assert result.nll == pytest.approx(300 * math.log(10))


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [(1.0, 14), (1 - 1e-9, 14), (14.5 / 15, 14), (13.5 / 15, 13), (0.5, 7), (0.51, 7), (8.01 / 15, 8)],
)
def test_a_confidence_falls_into_its_bin(confidence: float, expected: int) -> None:
    bins = reliability(logs([[confidence, 1 - confidence]]), np.array([0]))
    assert np.flatnonzero(bins.count).tolist() == [expected]


def test_bins_are_open_below_and_closed_above() -> None:
    # 0.2 = 3/15 is exact enough: bin (2/15, 3/15]; three classes so that 0.2 … cannot be the largest, 7 can.
    edge = np.log(np.array([[0.2, *[0.8 / 6] * 6]]))
    assert np.exp(edge[0, 0]) <= 0.2
    assert np.flatnonzero(reliability(edge, np.array([0])).count).tolist() == [2]


def test_empty_bins_are_nan_and_full_ones_add_up() -> None:
    log_p, labels = predictions(500)
    bins = reliability(log_p, labels)
    assert bins.count.sum() == 500
    assert np.isnan(bins.accuracy[bins.count == 0]).all()
    weighted = (bins.accuracy * bins.count)[bins.count > 0].sum() / 500
    assert 100 * weighted == pytest.approx(metrics_of(log_p, labels).accuracy)


# ---- against other definitions


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_calibration_errors_are_torchmetrics_away_from_bin_edges(scale: float) -> None:
    log_p, labels = predictions(scale=scale)
    p, target = torch.from_numpy(np.exp(log_p)), torch.from_numpy(labels)
    for norm, name in (("l1", "ece"), ("max", "mce")):
        expected = multiclass_calibration_error(p, target, num_classes=7, n_bins=15, norm=norm)
        assert getattr(metrics_of(log_p, labels), name) == pytest.approx(100 * float(expected), abs=1e-3)


def test_accuracy_brier_and_nll_are_the_usual_ones() -> None:
    log_p, labels = predictions()
    result = metrics_of(log_p, labels)
    target = torch.from_numpy(labels)
    accuracy = multiclass_accuracy(torch.from_numpy(log_p), target, num_classes=7, average="micro")
    assert result.accuracy == pytest.approx(100 * float(accuracy), abs=1e-4)
    one_hot = np.eye(7)[labels]
    assert result.brier == pytest.approx(((np.exp(log_p) - one_hot) ** 2).sum(1).mean())
    assert result.nll == pytest.approx(float(torch.nn.functional.nll_loss(torch.from_numpy(log_p), target)))


def naive_auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    pairs = [(1.0 if p > n else 0.5 if p == n else 0.0) for p in positive for n in negative]
    return sum(pairs) / len(pairs)


# A few values only: ties are common.
some_scores = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 1e-9, 50.0, 50.0000001]), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(some_scores, some_scores)
def test_auroc_is_the_share_of_pairs_in_order(positive: list[float], negative: list[float]) -> None:
    got = auroc(np.array(positive), np.array(negative))
    assert got == pytest.approx(naive_auroc(np.array(positive), np.array(negative)), abs=1e-6)


def test_auroc_of_probabilities_is_torchmetrics() -> None:
    generator = np.random.default_rng(0)
    positive, negative = generator.beta(3, 2, 200), generator.beta(2, 3, 300)
    scores = torch.from_numpy(np.concatenate([positive, negative]))
    expected = binary_auroc(scores, torch.tensor([1] * 200 + [0] * 300))
    assert auroc(positive, negative) == pytest.approx(float(expected), abs=1e-6)


def test_auroc_sees_differences_that_a_sigmoid_would_merge() -> None:
    assert auroc(np.array([50.0000001]), np.array([50.0])) == 1.0
    assert auroc(np.array([900.0]), np.array([800.0])) == 1.0


def test_auroc_of_an_empty_side_is_nan_and_of_equals_a_half() -> None:
    assert math.isnan(auroc(np.array([]), np.array([1.0])))
    assert math.isnan(auroc(np.array([1.0]), np.array([])))
    assert auroc(np.ones(3), np.ones(4)) == 0.5


# ---- entropy and what is made of it


def test_entropy_of_certainty_is_zero_and_of_ignorance_log_c() -> None:
    values = entropy(logs([[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.5, 0.0, 0.0]]))
    assert values == pytest.approx([0.0, math.log(4), math.log(2)])
    assert np.isfinite(values).all()


def test_wrong_answers_are_the_positives_of_misclassification() -> None:
    sure_right, unsure_wrong = [0.98, 0.01, 0.01], [0.4, 0.35, 0.25]
    log_p = logs([sure_right] * 3 + [unsure_wrong] * 2)
    assert misclassification_auroc(log_p, np.array([0, 0, 0, 1, 2])) == 1.0
    assert misclassification_auroc(log_p, np.array([1, 1, 1, 0, 0])) == 0.0
    assert math.isnan(misclassification_auroc(log_p, np.zeros(5, np.int64)))


def test_strangers_are_the_positives_of_ood_detection() -> None:
    sure, unsure = logs([[0.97, 0.03]] * 4), logs([[0.55, 0.45]] * 9)
    assert ood_auroc(sure, unsure, 0) == (1.0, 0.0)
    assert ood_auroc(unsure, sure, 0) == (0.0, 0.0)


def test_ood_draws_are_balanced_seeded_and_repeated_five_times() -> None:
    inside, _ = predictions(40, scale=3.0)
    outside, _ = predictions(400, seed=1, scale=1.0)
    mean, deviation = ood_auroc(inside, outside, seed=3)
    assert (mean, deviation) == ood_auroc(inside, outside, seed=3)
    assert (mean, deviation) != ood_auroc(inside, outside, seed=4)
    assert deviation > 0
    everything = naive_auroc(entropy(outside), entropy(inside))
    # All 40 known rows are in every draw; the mean of five draws of 40 strangers has this standard error.
    spread = np.std([np.mean(entropy(inside) < value) for value in entropy(outside)])
    assert abs(mean - everything) < 5 * spread / math.sqrt(5 * 40)
    assert 0.3 * spread / math.sqrt(40) < deviation < 3 * spread / math.sqrt(40)


def test_equal_sizes_leave_nothing_to_draw() -> None:
    inside, _ = predictions(50, scale=3.0)
    outside, _ = predictions(50, seed=1, scale=1.0)
    mean, deviation = ood_auroc(inside, outside, seed=0)
    assert mean == pytest.approx(naive_auroc(entropy(outside), entropy(inside)), abs=1e-6)
    assert deviation == pytest.approx(0.0, abs=1e-7)
