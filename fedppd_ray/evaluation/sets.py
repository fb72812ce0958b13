"""What prediction sets come to: how often they hold the right class, and how many classes they name.

Overall, which is what is promised; and, because it is not promised there, for each class and each client.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppd_ray.config.conformal import ConformalConfig
from fedppd_ray.evaluation.per_client import client_weights
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.conformal import (
    Level,
    Mask,
    Rule,
    class_weights,
    conformal_card,
    conformal_level,
    exact_tally,
)
from fedppd_ray.inference.scores import Floats, Labels

REPORTED = (0.8, 0.9, 0.95, 0.99)


def calibrated_sets(
    config: ConformalConfig,
    log_probabilities: Floats,
    labels: Labels,
    classes: Sequence[str],
    clients: Sequence[ClientInfo],
) -> dict[str, Any]:
    """The entry of a model card, from calibration rows at the temperature they are served at.

    Its `coverage` is that of the same rows, by class and client; `evaluate` has it of test rows.
    """
    rule = Rule(config.method, config.penalty, config.free_classes)
    weights = class_weights(config.shares, classes, np.bincount(labels, minlength=len(classes)))
    tally = exact_tally(rule, log_probabilities, labels, weights)
    entry = conformal_card(rule, tally, weights, config.confidence, len(labels))
    level = conformal_level({"conformal": entry}, config.confidence)
    return entry | {"coverage": _groups(level, log_probabilities, labels, classes, clients)}


def set_figures(
    card: Mapping[str, Any], log_probabilities: Floats, labels: Labels, clients: Sequence[ClientInfo]
) -> dict[str, Any]:
    """On test rows, as served: coverage in percent and mean size of the sets, at several confidences."""
    entry, classes = card["conformal"], card["classes"]
    level = conformal_level(card, entry["confidence"])
    table = []
    for confidence in sorted({*REPORTED, entry["confidence"]}):
        inside = _members(conformal_level(card, confidence), log_probabilities)
        table.append({"confidence": confidence, **_covered(inside, labels, np.full(len(labels), 1 / len(labels)))})
    return {
        "method": entry["method"],
        "guarantee": entry["guarantee"],
        "calibration_rows": entry["rows"],
        "source": entry["source"],
        "confidence": entry["confidence"],
        **_groups(level, log_probabilities, labels, classes, clients),
        "table": table,
    }


def _members(level: Level | None, log_probabilities: Floats) -> Mask:
    if level is None:
        raise ValueError("no confidence is given")
    return level.members(log_probabilities)


def _groups(
    level: Level | None,
    log_probabilities: Floats,
    labels: Labels,
    classes: Sequence[str],
    clients: Sequence[ClientInfo],
) -> dict[str, Any]:
    inside = _members(level, log_probabilities)
    result: dict[str, Any] = _covered(inside, labels, np.full(len(labels), 1 / len(labels)))
    rows = np.bincount(labels, minlength=len(classes))
    result["classes"] = {
        name: {"rows": int(rows[number]), **_covered(inside, labels, (labels == number) / rows[number])}
        for number, name in enumerate(classes)
        if rows[number]
    }
    told = [info for info in clients if info.class_counts]
    if told:
        weights, kept = client_weights(labels, np.array([info.class_counts for info in told], np.float64))
        result["sites"] = {
            told[at].client: _covered(inside, labels, own) for at, own in zip(kept, weights, strict=True)
        }
    return result


def _covered(inside: Mask, labels: Labels, weights: Floats) -> dict[str, float]:
    """Weights of rows that sum to 1."""
    held = inside[np.arange(len(labels)), labels]
    return {"coverage": 100 * float(weights @ held), "size": float(weights @ inside.sum(axis=1))}
