"""Prediction sets: mapie's on the same rows, and coverage within the exact bounds of its distribution."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, LACConformityScore, RAPSConformityScore
from scipy.stats import betabinom
from sklearn.base import BaseEstimator, ClassifierMixin

from fedppd_ray.config.file import parse_config
from fedppd_ray.errors import ConfigError
from fedppd_ray.inference.conformal import (
    BINS,
    Rule,
    Tally,
    binned_mass,
    class_weights,
    conformal_card,
    conformal_level,
    edges,
    estimated_shares,
    exact_tally,
    members,
    thresholds,
)
from fedppd_ray.inference.scores import Floats, Labels

RULES = [Rule("lac"), Rule("aps"), Rule("raps", 0.1, 1)]
ONES = np.ones(6)


def predictions(rows: int, classes: int = 6, seed: int = 0) -> tuple[Floats, Labels]:
    """Labels of a distribution that the predictions know only in part: every other row is over-confident."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1.5, (rows, classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (generator.uniform(size=(rows, 1)) > np.cumsum(p, axis=1)).sum(axis=1).clip(0, classes - 1)
    logits[::2] *= 3
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return log_p, labels


# ---- mapie


class Known(ClassifierMixin, BaseEstimator):
    """An estimator whose inputs are the probabilities."""

    def __init__(self, classes: int = 6) -> None:
        self.classes = classes
        self.classes_ = np.arange(classes)

    def fit(self, *_arguments: Any) -> "Known":
        return self

    def predict_proba(self, p: Floats) -> Floats:
        return p

    def predict(self, p: Floats) -> Labels:
        return p.argmax(axis=1)

    def __sklearn_is_fitted__(self) -> bool:
        return True


class FixedCoin(np.random.RandomState):
    """mapie throws a coin for each calibration row; ours always falls on the same side."""

    def uniform(self, *_arguments: Any, size: Any = None, **_more: Any) -> Any:
        return np.ones(size)


def mapie_sets(
    score: Any, known: Floats, labels: Labels, new: Floats, confidence: float
) -> tuple[np.ndarray, SplitConformalClassifier]:
    made = SplitConformalClassifier(
        Known(), confidence_level=confidence, conformity_score=score, prefit=True, random_state=FixedCoin(0)
    )
    made.conformalize(np.exp(known), labels)
    return made.predict_set(np.exp(new))[1][:, :, 0], made


@pytest.mark.parametrize("confidence", [0.6, 0.8, 0.9, 0.95])
@pytest.mark.parametrize(("rule", "score"), [(Rule("lac"), LACConformityScore), (Rule("aps"), APSConformityScore)])
def test_the_sets_are_those_of_mapie(rule: Rule, score: Any, confidence: float) -> None:
    log_p, labels = predictions(1300)
    known, new = log_p[:300], log_p[300:]
    theirs, _ = mapie_sets(score(), known, labels[:300], new, confidence)
    ours = members(rule, new, thresholds(exact_tally(rule, known, labels[:300], ONES), confidence, ONES))
    empty = ~theirs.any(axis=1)
    assert np.array_equal(ours[~empty], theirs[~empty])
    # Where mapie names nobody, the most probable class stands alone.
    assert np.array_equal(ours[empty].argmax(axis=1), new[empty].argmax(axis=1))
    assert (ours[empty].sum(axis=1) == 1).all()


def test_the_threshold_of_raps_is_that_of_mapie_and_its_sets_are_no_larger() -> None:
    log_p, labels = predictions(1500, seed=3)
    score = RAPSConformityScore(size_raps=0.4)
    theirs, made = mapie_sets(score, log_p[:500], labels[:500], log_p[500:], 0.9)
    inner = made._mapie_classifier.conformity_score_function_
    rule = Rule("raps", float(inner.lambda_star), int(inner.k_star[0]))
    kept = np.flatnonzero((np.exp(log_p[:500])[:, None] != inner.y_pred_proba_raps[None]).any(axis=2).all(axis=1))
    limits = thresholds(exact_tally(rule, log_p[kept], labels[kept], ONES), 0.9, ONES)
    assert limits[0] == pytest.approx(float(inner.quantiles_[0]), abs=1e-12)
    ours = members(rule, log_p[500:], limits)
    # mapie asks the penalty of the class before: its sets may have one class more, and the same but for that.
    assert not (ours & ~theirs).any()
    assert ((theirs & ~ours).sum(axis=1) <= 1).all()


# ---- the promise


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("calibration", [19, 200])
def test_over_1000_resplits_coverage_has_the_beta_binomial_distribution(rule: Rule, calibration: int) -> None:
    """Without ties, of m new rows BetaBinomial(m, k, n + 1 − k) are covered, k = ⌈(n + 1)·confidence⌉.

    Bounds: the mean within five standard errors of k/(n + 1) from below (from above too, without ties), and no more
    resplits below the 1 % quantile than a binomial would have in one of a million tests.
    """
    confidence, new, splits = 0.9, 300, 1000
    generator = np.random.default_rng(5)
    held = np.empty(splits)
    for split in range(splits):
        # Fresh rows each time: resplits of the same rows are not independent of each other.
        log_p, labels = predictions(calibration + new, seed=int(generator.integers(2**31)))
        own = rule.of_labels(log_p, labels)
        limits = thresholds(exact_tally(rule, log_p[:calibration], labels[:calibration], ONES), confidence, ONES)
        held[split] = (own[calibration:] <= limits[0]).sum()
    rank = math.ceil((calibration + 1) * confidence - 1e-9)
    law = betabinom(new, rank, calibration + 1 - rank)
    error = law.std() / math.sqrt(splits)
    assert held.mean() >= law.mean() - 5 * error
    if rule.kind == "lac":  # the others tie at the score of every most probable class
        assert held.mean() <= law.mean() + 5 * error
    low = law.ppf(0.01)
    share = law.cdf(low - 1)
    assert (held < low).mean() <= share + 5 * math.sqrt(share * (1 - share) / splits) + 1 / splits


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from([0.5, 0.7, 0.9, 0.95, 0.99]), st.integers(0, 99))
def test_the_threshold_is_the_order_statistic_of_n_plus_1(rows: int, confidence: float, seed: int) -> None:
    log_p, labels = predictions(rows, seed=seed)
    own = np.sort(Rule("lac").of_labels(log_p, labels))
    rank = math.ceil((rows + 1) * confidence - 1e-9)
    wanted = own[rank - 1] if rank <= rows else math.inf
    assert (thresholds(exact_tally(Rule("lac"), log_p, labels, ONES), confidence, ONES) == wanted).all()


def test_no_set_is_empty_and_equal_questions_have_equal_answers() -> None:
    log_p, labels = predictions(500)
    for rule in RULES:
        limits = thresholds(exact_tally(rule, log_p, labels, ONES), 0.5, ONES)
        first = members(rule, log_p, limits)
        assert first.any(axis=1).all()
        assert first[np.arange(500), log_p.argmax(axis=1)].all()
        assert np.array_equal(first, members(rule, log_p, limits))


def test_higher_confidence_means_larger_sets() -> None:
    log_p, labels = predictions(400)
    for rule in RULES:
        card = {"conformal": conformal_card(rule, exact_tally(rule, log_p, labels, ONES), ONES, 0.9, 400)}
        before = np.zeros((400, 6), bool)
        for confidence in (0.3, 0.5, 0.777, 0.9, 0.95, 0.99, 0.9999):
            level = conformal_level(card, confidence)
            assert level is not None
            assert level.confidence >= confidence
            inside = level.members(log_p)
            assert not (before & ~inside).any()
            before = inside
        assert before.all()  # 400 rows cannot vouch for 99.99 %: only all classes are sure enough


def test_round_confidences_have_a_level_of_their_own() -> None:
    log_p, labels = predictions(999)
    tally = exact_tally(Rule("lac"), log_p, labels, ONES)
    card = {"conformal": conformal_card(Rule("lac"), tally, ONES, 0.9, 999)}
    own = np.sort(Rule("lac").of_labels(log_p, labels))
    for confidence in (0.8, 0.9, 0.95, 0.99, 0.995):
        level = conformal_level(card, confidence)
        assert level is not None
        assert level.confidence == confidence
        assert level.limits.tolist() == [own[round(1000 * confidence) - 1]]


# ---- label shift


def test_weights_of_one_change_nothing() -> None:
    log_p, labels = predictions(300)
    shares = {str(y): int((labels == y).sum()) / 300 for y in range(6)}
    weights = class_weights(shares, list("012345"), np.bincount(labels, minlength=6))
    assert weights == pytest.approx(1)
    found = [thresholds(exact_tally(Rule("aps"), log_p, labels, w), 0.9, w) for w in (weights, ONES)]
    assert np.array_equal(*found)


def test_weighted_sets_cover_where_classes_have_other_shares() -> None:
    """Mostly the worst class: covered too little without weights, and as promised, within five errors, with them."""
    log_p, labels = predictions(4000, seed=2)
    bias = np.array([-2.5, 0, 0, 0, 0, 0])  # a network that overlooks class 0
    log_p = log_p + bias
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    shares = np.array([0.8, 0.04, 0.04, 0.04, 0.04, 0.04])
    generator = np.random.default_rng(1)
    plain: list[float] = []
    weighted: list[float] = []
    for _ in range(200):
        order = generator.permutation(4000)
        known, new = order[:1500], order[1500:]
        chance = (shares / np.bincount(labels[new], minlength=6))[labels[new]]
        new = generator.choice(new, 400, p=chance / chance.sum())
        own = dict(zip("012345", shares, strict=True))
        weights = class_weights(own, list("012345"), np.bincount(labels[known], minlength=6))
        score = Rule("lac").of_labels(log_p[new], labels[new])
        for found, w in ((plain, ONES), (weighted, weights)):
            limits = thresholds(exact_tally(Rule("lac"), log_p[known], labels[known], w), 0.9, w)
            found.append((score <= limits[labels[new]]).mean())
    assert np.mean(plain) < 0.8
    error = np.std(weighted) / math.sqrt(len(weighted))
    assert abs(np.mean(weighted) - 0.9) < 5 * error + 2 / 1500


def test_a_class_without_calibration_rows_is_in_every_set() -> None:
    log_p, labels = predictions(300)
    labels = np.where(labels == 5, 4, labels)
    weights = class_weights(dict.fromkeys("012345", 1 / 6), list("012345"), np.bincount(labels, minlength=6))
    limits = thresholds(exact_tally(Rule("lac"), log_p, labels, weights), 0.8, weights)
    assert math.isinf(limits[5])
    assert np.isfinite(limits[:5]).all()


def test_shares_are_estimated_from_predictions_alone() -> None:
    log_p, labels = predictions(20_000, seed=7)
    guess = log_p.argmax(axis=1)
    confusion = np.zeros((6, 6), np.int64)
    np.add.at(confusion, (labels, guess), 1)
    wanted = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    chance = (wanted / np.bincount(labels))[labels]
    rows = np.random.default_rng(0).choice(20_000, 8000, p=chance / chance.sum())
    found = estimated_shares(confusion, np.bincount(guess[rows], minlength=6).astype(float))
    assert found.sum() == pytest.approx(1)
    assert np.abs(found - wanted).max() < 0.05


# ---- from rows that stay at clients


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_sums_of_clients_histograms_give_thresholds_that_are_at_most_a_bin_too_high(rule: Rule) -> None:
    log_p, labels = predictions(900, seed=4)
    parts = [binned_mass(rule, log_p[at::7], labels[at::7], ONES) for at in range(7)]
    together = Tally(edges(rule, 6), np.sum(parts, axis=0))
    assert together.mass.sum() == 900
    width = rule.largest(6) / BINS
    for confidence in (0.5, 0.8, 0.9, 0.95, 0.99):
        pooled = thresholds(exact_tally(rule, log_p, labels, ONES), confidence, ONES)[0]
        found = thresholds(together, confidence, ONES)[0]
        assert pooled <= found <= pooled + width + 1e-6


# ---- configuration and card


def test_a_share_of_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.conformal\.shares: no class 'seven'"):
        parse_config({"evaluation": {"conformal": {"shares": {"seven": 1.0}}}})
    with pytest.raises(ConfigError, match="class '0' needs a share above 0"):
        parse_config({"evaluation": {"conformal": {"shares": {"1": 1.0}}}})


def test_a_card_without_calibration_rows_says_so() -> None:
    with pytest.raises(ConfigError, match=r"data\.calibration"):
        conformal_level({"abstention": None}, 0.9)
    assert conformal_level({"abstention": None}, None) is None
    with pytest.raises(ConfigError, match="between 0 and 1"):
        conformal_level({"conformal": {"table": []}}, 1.0)
