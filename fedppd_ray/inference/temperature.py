"""Temperature scaling (Guo et al., ICML 2017): one number, fitted on calibration rows, that mends over-confidence.

p ∝ p^β with β = 1/T. The NLL is convex in β, so its slope has one zero; and the slope is a sum over rows: where rows
are in several places, the places' sums are all that has to meet.
"""

from collections.abc import Callable

import numpy as np

from fedppd_ray.inference.scores import Floats, Labels

# Nothing that is trained needs more; without wrong answers the likelihood alone would ask for 0.
COLDEST, HOTTEST = 0.05, 20.0
_HALVINGS = 60


def scaled(log_probabilities: Floats, temperature: float) -> Floats:
    """log-probabilities at a temperature; at 1 the very same numbers."""
    if temperature == 1:
        return log_probabilities
    shrunk = log_probabilities / temperature
    shrunk -= shrunk.max(axis=1, keepdims=True)
    result: Floats = shrunk - np.log(np.exp(shrunk).sum(axis=1, keepdims=True))
    return result


def nll_slope(log_probabilities: Floats, labels: Labels, beta: float) -> float:
    """d/dβ of the summed NLL: Σ (E_β[log p] − log p_y)."""
    p = np.exp(scaled(log_probabilities, 1 / beta))
    # 0 · −∞ is 0: a class of no probability has none at any temperature.
    expected = np.where(p > 0, p * np.where(p > 0, log_probabilities, 0.0), 0.0).sum(axis=1)
    return float((expected - log_probabilities[np.arange(len(labels)), labels]).sum())


def fit_temperature(log_probabilities: Floats, labels: Labels) -> float:
    """The temperature of the smallest NLL on these rows; 1 where there are none."""
    if len(labels) == 0:
        return 1.0
    return temperature_by(lambda beta: nll_slope(log_probabilities, labels, beta))


def temperature_by(slope: Callable[[float], float]) -> float:
    """The zero of a slope in β, by halving: the slope rises with β."""
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return float(1 / (low * high) ** 0.5)
