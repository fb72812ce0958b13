"""The flag `ood` of an answer: its row scores as high as hardly any known row does.

The threshold is the ⌈(n + 1)·(1 − false alarms)⌉-th smallest score of n calibration rows: of rows like these, at most
the stated share is flagged. What share of foreign rows is flagged depends on how foreign they are: `evaluate` has it
for the out-of-distribution sets of the configuration.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppd_ray.inference.abstention import score_of
from fedppd_ray.inference.scores import Floats, Score, rank, score_named


def ood_card(score: Score, values: Floats, false_alarms: float) -> dict[str, Any]:
    """The entry of a model card; the threshold is null where so few rows cannot vouch for so few false alarms."""
    place = rank(len(values), 1 - false_alarms)
    threshold = None if place is None else float(np.sort(values)[place - 1])
    return {"score": score.name, "false_alarms": false_alarms, "threshold": threshold, "rows": len(values)}


def is_foreign(card: Mapping[str, Any], values: Floats) -> Any:
    """Which rows, of their values of the card's OOD score, are flagged; none, where the card has no threshold."""
    threshold = (card.get("ood") or {}).get("threshold")
    return values > (math.inf if threshold is None else threshold)


def ood_score_of(card: Mapping[str, Any]) -> str:
    return str((card.get("ood") or {}).get("score", score_of(card)))


def scores_beyond(card: Mapping[str, Any]) -> list[Score]:
    """The scores of a card that are no function of log-probabilities: one more number for a row each, in this order."""
    names = dict.fromkeys([score_of(card), ood_score_of(card)])
    return [score for score in map(score_named, names) if score.needs != "log_probabilities"]
