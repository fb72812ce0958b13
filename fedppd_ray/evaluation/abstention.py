"""When to say "I don't know": entropy thresholds chosen on held-out calibration data for a stated coverage."""

from typing import Any

import numpy as np

from fedppd_ray.evaluation.metrics import Floats, Labels, entropy

_COVERAGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 1.0)


def abstention_card(log_probabilities: Floats, labels: Labels, coverage: float) -> dict[str, Any]:
    """The threshold for `coverage` and the risk–coverage table that a request may choose another from.

    A prediction abstains when its entropy is above the threshold. `risk` is the share of wrong answers, in
    percent, among the calibration rows that are answered.
    """
    uncertainty = entropy(log_probabilities)
    wrong = log_probabilities.argmax(axis=1) != labels
    classes = log_probabilities.shape[1]
    table = []
    for level in sorted({*_COVERAGES, coverage}):
        threshold = threshold_for(uncertainty, level, classes)
        answered = uncertainty <= threshold
        table.append({"coverage": level, "threshold": threshold, "risk": 100 * float(wrong[answered].mean())})
    return {
        "rows": len(labels),
        "coverage": coverage,
        "threshold": threshold_for(uncertainty, coverage, classes),
        "table": table,
    }


def threshold_for(uncertainty: Floats, coverage: float, classes: int) -> float:
    """The smallest threshold that answers at least the share `coverage` of these rows; at 1, of any rows."""
    if coverage >= 1:
        return float(np.log(classes)) + 1e-9
    ordered = np.sort(uncertainty)
    return float(ordered[max(1, int(np.ceil(coverage * len(ordered) - 1e-9))) - 1])
