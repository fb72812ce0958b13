"""The flag of rows that look like none of the known ones: how often it is wrong about known rows is what was asked."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import EvaluationConfig
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.calibration import calibrate, needs_network
from fedppd_ray.inference.ood_flag import is_foreign, ood_card, scores_beyond
from fedppd_ray.inference.scores import ENTROPY, Outputs, score_named
from fedppd_ray.inference.student import describe_predictions
from tests.unit.test_conformal import predictions


@pytest.mark.parametrize("false_alarms", [0.01, 0.05, 0.2])
def test_known_rows_are_flagged_as_often_as_stated(false_alarms: float) -> None:
    """Over calibration rows and a new one, without ties, it is flagged with probability 1 − ⌈(n+1)(1−a)⌉/(n+1)."""
    rows, draws = 150, 4000
    values = np.random.default_rng(0).normal(size=(draws, rows + 1))
    flagged = sum(
        bool(is_foreign({"ood": ood_card(ENTROPY, known[:-1], false_alarms)}, known[-1:])[0]) for known in values
    )
    chance = 1 - math.ceil((rows + 1) * (1 - false_alarms) - 1e-9) / (rows + 1)
    assert chance <= false_alarms
    low, high = binom.interval(1 - 1e-6, draws, chance)
    assert low <= flagged <= high


def test_so_few_rows_that_nothing_is_sure_flag_nothing() -> None:
    card = {"ood": ood_card(ENTROPY, np.arange(10.0), 0.05)}
    assert card["ood"]["threshold"] is None
    assert not is_foreign(card, np.array([1e9]))[0]


def test_abstention_and_flag_may_go_by_different_scores() -> None:
    log_p, labels = predictions(400)
    logits = log_p + np.random.default_rng(1).normal(size=(400, 1))
    known = Outputs(log_p, logits)
    config = EvaluationConfig.model_validate({"ood_flag": {"score": "energy", "false_alarms": 0.1}})
    assert needs_network(config)
    found = calibrate(config, known, labels, lambda: known)
    card = {"classes": list("012345"), "abstention": found.abstention, **found.entry()}
    assert (card["score"], card["ood"]["score"]) == ("entropy", "energy")
    assert [score.name for score in scores_beyond(card)] == ["energy"]
    evidence = np.column_stack([log_p, score_named("energy").of(known)])
    answers = describe_predictions(card, evidence)
    flags = np.array([answer["ood"] for answer in answers])
    assert np.array_equal(flags, score_named("energy").of(known) > card["ood"]["threshold"])
    assert flags.sum() == 400 - math.ceil(401 * 0.9)
    assert not np.array_equal(flags, [answer["abstain"] for answer in answers])


def test_a_card_without_a_threshold_flags_nothing() -> None:
    log_p, _ = predictions(5)
    card = {"classes": list("012345"), "abstention": None}
    assert not any(answer["ood"] for answer in describe_predictions(card, log_p))


def test_an_unknown_score_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.ood_flag\.score: unknown name 'entropi'"):
        parse_config({"evaluation": {"ood_flag": {"score": "entropi"}}})
