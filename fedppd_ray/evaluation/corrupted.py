"""The same figures on test rows that were made worse."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppd_ray.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import Predictor
from fedppd_ray.inference.temperature import scaled

_KEYS = ("accuracy", "nll", "ece")


def corruption_figures(held_out: HeldOut, predict: Predictor, temperature: float) -> dict[str, Any]:
    """Corruption → for each severity accuracy, NLL and ECE, and the ECE at the temperature; and the mean of all."""
    images, labels = held_out.images("test"), held_out.labels("test")
    figures: dict[str, list[dict[str, float]]] = {}
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            seen = held_out.outputs(predict, corrupted(images, name, severity)).log_probabilities
            found = metrics_of(seen, labels).as_dict()
            line = {key: found[key] for key in _KEYS}
            line["scaled_ece"] = metrics_of(scaled(seen, temperature), labels).ece
            figures.setdefault(name, []).append({"severity": severity, **line})
    return {"mean": _mean(figures), **figures}


def _mean(figures: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    lines = [line for severities in figures.values() for line in severities]
    return {key: float(np.mean([line[key] for line in lines])) for key in (*_KEYS, "scaled_ece")}
