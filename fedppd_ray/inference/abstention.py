"""When to say "I don't know": thresholds on a score, chosen on held-out calibration data for a stated coverage."""

from collections.abc import Mapping
from typing import Any

from fedppd_ray.errors import ConfigError
from fedppd_ray.inference.scores import ENTROPY, Floats, Labels, Score, rank

_COVERAGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 1.0)


def abstention_card(
    log_probabilities: Floats, labels: Labels, coverage: float, score: Score = ENTROPY, values: Floats | None = None
) -> dict[str, Any] | None:
    """The threshold for `coverage` and the risk–coverage table that a request may choose another from.

    `values` are the rows' scores, where these are no function of log-probabilities alone.

    A prediction abstains when its score is above the threshold. `risk` is the share of wrong answers, in percent, among
    the calibration rows that are answered. None where there are too few rows for this coverage.
    """
    if too_few(len(labels), coverage):
        return None
    values = score(log_probabilities) if values is None else values
    wrong = log_probabilities.argmax(axis=1) != labels
    classes = log_probabilities.shape[1]
    table = []
    for level in levels_of(coverage):
        threshold = score.threshold(values, level, classes)
        answered = values <= threshold
        table.append({"coverage": level, "threshold": threshold, "risk": 100 * float(wrong[answered].mean())})
    return {
        "score": score.name,
        "rows": len(labels),
        "coverage": coverage,
        "threshold": score.threshold(values, coverage, classes),
        "table": table,
    }


def levels_of(coverage: float) -> list[float]:
    """The coverages of the table."""
    return sorted({*_COVERAGES, coverage})


def too_few(rows: int, coverage: float) -> bool:
    """Whether no threshold can be set: for 95 % it takes 19 rows."""
    return coverage < 1 and rank(rows, coverage) is None


def never_abstains(card: Mapping[str, Any]) -> str | None:
    """What people must be told of a student that answers everything; None where it has a threshold."""
    if card["abstention"]:
        return None
    return (
        "NOTHING WILL ABSTAIN: this student has no threshold, because there were no calibration rows, or too few; "
        "every answer says abstain: false, however unsure. Train with data.calibration: auto, or with more rows"
    )


def abstention_level(card: Mapping[str, Any], coverage: float | None = None) -> dict[str, float] | None:
    """The current coverage and threshold of a model card: the export's default, or the table's nearest level that
    answers at least the share `coverage`. None where the export was not calibrated."""
    calibration = card["abstention"]
    if not calibration:
        if coverage is not None:
            raise ConfigError("coverage: this student was exported without calibration rows, so it never abstains")
        return None
    if coverage is None:
        return {"coverage": calibration["coverage"], "threshold": calibration["threshold"]}
    if not 0 < coverage <= 1:
        raise ConfigError(f"coverage: {coverage:g} is not a share above 0 and at most 1")
    row = min((row for row in calibration["table"] if row["coverage"] >= coverage), key=lambda row: row["coverage"])
    return {"coverage": row["coverage"], "threshold": row["threshold"]}


def score_of(card: Mapping[str, Any]) -> str:
    """The name of the score that a card's threshold is on, and that tells what is foreign."""
    return str((card["abstention"] or card).get("score", ENTROPY.name))


def temperature_of(card: Mapping[str, Any]) -> float:
    """The temperature that a card's probabilities are meant at; exports of earlier versions have none."""
    return float(card.get("temperature", 1.0))
