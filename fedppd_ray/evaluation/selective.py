"""How well a score tells rows to be trusted from others: wrong answers, and rows that belong to no class."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppd_ray.evaluation.metrics import aupr, auroc, balanced_draws, fpr95
from fedppd_ray.inference.scores import Floats, Labels, Outputs, Score

SELECTIVE = (80, 90, 95)  # percent of the rows that are answered


def risks(scores: Floats, wrong: Labels) -> Floats:
    """Share of wrong answers among the 1, 2, …, n rows of the lowest score (ties in the order of the rows)."""
    order = np.argsort(scores, kind="stable")
    so_far: Floats = np.cumsum(wrong[order]) / np.arange(1, len(order) + 1)
    return so_far


def selective_figures(scores: Floats, outputs: Outputs, labels: Labels) -> dict[str, Any]:
    """AURC (Geifman & El-Yaniv, 2017), in percent, and the accuracy of the share of rows that is answered."""
    wrong = (outputs.log_probabilities.argmax(axis=1) != labels).astype(np.int64)
    curve = risks(scores, wrong)
    answered = {share: max(1, math.ceil(share / 100 * len(curve) - 1e-9)) for share in SELECTIVE}
    return {
        "misclassification_auroc": finite(auroc(scores[wrong == 1], scores[wrong == 0])),
        "aurc": 100 * float(curve.mean()),
        **{f"accuracy_at_{share}": 100 * (1 - float(curve[rows - 1])) for share, rows in answered.items()},
    }


def foreign_figures(known: Floats, foreign: Mapping[str, Floats], seed: int) -> dict[str, dict[str, float]]:
    """Set → AUROC and AUPR (means over 5 balanced draws; foreign rows are the positives) and FPR95, in percent."""
    result = {}
    for name, unknown in foreign.items():
        draws = list(balanced_draws(unknown, known, seed))
        found = [auroc(*draw) for draw in draws]
        result[name] = {
            "auroc": float(np.mean(found)),
            "auroc_sd": float(np.std(found, ddof=1)),
            "aupr": float(np.mean([aupr(*draw) for draw in draws])),
            "fpr95": fpr95(unknown, known),
        }
    return result


def mean_ood_auroc(known: Floats, foreign: Mapping[str, Floats], seed: int) -> tuple[float, float]:
    """The mean over the sets, as `metrics.ood_auroc` has it for one: mean and standard deviation over the draws."""
    by_set = [[auroc(*draw) for draw in balanced_draws(unknown, known, seed)] for unknown in foreign.values()]
    values = np.mean(by_set, axis=0)
    return float(np.mean(values)), float(np.std(values, ddof=1))


def score_figures(
    score: Score, known: Outputs, labels: Labels, foreign: Mapping[str, Outputs], seed: int
) -> dict[str, Any] | None:
    """What one score does; None where the predictor has not what it is made of."""
    if not score.fits(known):
        return None
    values = score.of(known)
    outside = {name: score.of(outputs) for name, outputs in foreign.items()}
    figures = selective_figures(values, known, labels)
    if outside:
        found = foreign_figures(values, outside, seed)
        mean, deviation = mean_ood_auroc(values, outside, seed)
        figures |= {"ood": found, "ood_auroc": mean, "ood_auroc_sd": deviation}
        figures |= {key: float(np.mean([one[key] for one in found.values()])) for key in ("aupr", "fpr95")}
    return figures


def finite(value: float) -> float | None:
    """JSON has no NaN: a figure that is not defined (no wrong answer, say) is null."""
    return value if math.isfinite(value) else None
