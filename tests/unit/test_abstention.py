"""Thresholds for saying "I don't know"."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.inference.abstention import abstention_card, never_abstains
from fedppd_ray.inference.scores import ENTROPY, entropy


def predictions(rows: int = 200, classes: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities whose uncertain rows are more often wrong."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1, (rows, classes)) * generator.uniform(0.1, 6, (rows, 1))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = np.array([generator.choice(classes, p=np.exp(row) / np.exp(row).sum()) for row in log_p])
    return log_p, labels


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_threshold_answers_at_least_the_stated_share_and_no_row_more_than_needed(
    rows: int, coverage: float, seed: int
) -> None:
    uncertainty = np.random.default_rng(seed).uniform(0, 2, rows)
    threshold = ENTROPY.threshold(uncertainty, coverage, 10)
    answered = int((uncertainty <= threshold).sum())
    if threshold == ENTROPY.highest(10):
        assert coverage * (rows + 1) > rows - 1e-6  # too few rows for this coverage
        return
    assert answered >= coverage * (rows + 1) - 1e-6
    assert answered - 1 < coverage * (rows + 1)  # without ties one row fewer would be too few


@pytest.mark.parametrize(("coverage", "answered"), [(0.5, 100), (0.925, 185), (0.95, 190), (0.99, 198), (0.7, 140)])
def test_round_shares_are_met_exactly(coverage: float, answered: int) -> None:
    uncertainty = np.random.default_rng(0).uniform(0, 2, 199)  # with the new row, 200
    assert (uncertainty <= ENTROPY.threshold(uncertainty, coverage, 10)).sum() == answered


def test_a_new_row_is_answered_as_often_as_stated() -> None:
    """39 of 40 + 1 rows below the threshold: 95.1 %, which 38, without the correction, would miss by 2.4 %."""
    generator, repeats, rows = np.random.default_rng(1), 4000, 40
    draws = generator.uniform(0, 1, (repeats, rows))
    answered = np.mean([ENTROPY.threshold(known, 0.95, 10) for known in draws])  # of a uniform score, the probability
    deviation = math.sqrt(39 * 2 / (41**2 * 42) / repeats)  # of the mean of Beta(39, 2) variables
    assert answered == pytest.approx(39 / 41, abs=4 * deviation)
    assert answered >= 0.95 - 4 * deviation


def test_too_few_rows_set_no_threshold_and_people_are_told() -> None:
    log_p, labels = predictions(rows=18)
    assert abstention_card(log_p, labels, 0.95) is None
    assert abstention_card(*predictions(rows=19), 0.95) is not None
    assert "NOTHING WILL ABSTAIN" in str(never_abstains({"abstention": None}))
    assert never_abstains({"abstention": abstention_card(*predictions(rows=19), 0.95)}) is None


def test_full_coverage_never_abstains_on_any_row() -> None:
    uniform = np.full((1, 10), math.log(0.1))
    known = np.array([0.01, 0.02])
    assert entropy(uniform)[0] <= ENTROPY.threshold(known, 1.0, 10)
    assert ENTROPY.threshold(known, 1.0, 10) < math.log(10) + 1e-6


def test_ties_are_answered_together() -> None:
    assert ENTROPY.threshold(np.array([0.1, 0.1, 0.1, 0.9]), 0.5, 10) == 0.1


def test_the_table_is_monotone_and_holds_the_asked_coverage() -> None:
    log_p, labels = predictions()
    card = abstention_card(log_p, labels, 0.87)
    coverages = [row["coverage"] for row in card["table"]]
    thresholds = [row["threshold"] for row in card["table"]]
    assert coverages == sorted(set(coverages))
    assert 0.87 in coverages
    assert coverages[-1] == 1.0
    assert thresholds == sorted(thresholds)
    assert card["threshold"] == next(row["threshold"] for row in card["table"] if row["coverage"] == 0.87)
    assert (card["rows"], card["coverage"]) == (200, 0.87)


def test_the_risk_is_the_error_rate_among_answered_rows() -> None:
    log_p, labels = predictions()
    uncertainty, wrong = entropy(log_p), log_p.argmax(1) != labels
    for row in abstention_card(log_p, labels, 0.95)["table"]:
        answered = uncertainty <= row["threshold"]
        assert row["risk"] == pytest.approx(100 * wrong[answered].sum() / answered.sum())


def test_abstaining_lowers_the_risk_where_uncertainty_means_something() -> None:
    table = abstention_card(*predictions(2000), 0.95)["table"]
    assert table[0]["risk"] < 0.5 * table[-1]["risk"]
