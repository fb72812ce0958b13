"""How unsure a prediction is: scores by name, of which the predictive entropy is the first.

A score is high where the prediction should not be trusted. It sets the abstention threshold (on calibration rows, for a
stated coverage) and tells out-of-distribution rows from others; the model card records which one.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.nouns import SCORES

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Outputs:
    """What a predictor says of rows: always log-probabilities; logits and features where it is a single network."""

    log_probabilities: Floats
    logits: Floats | None = None
    features: NDArray[np.float32] | None = None  # what its last linear layer is given


@dataclass(frozen=True)
class Score:
    """`function`: rows × classes log-probabilities → one number per row; `limit`: classes → the most it can be.

    With `needs="logits"` or `"features"` the function is given those instead; an ensemble has neither.
    """

    name: str
    function: Callable[[Floats], Floats]
    limit: Callable[[int], float] = lambda _classes: float("inf")
    needs: Literal["log_probabilities", "logits", "features"] = "log_probabilities"

    def __call__(self, values: Floats) -> Floats:
        return self.function(values)

    def fits(self, outputs: Outputs) -> bool:
        """Whether the predictor has what this score is made of."""
        return getattr(outputs, self.needs) is not None

    def of(self, outputs: Outputs) -> Floats:
        """The score of every row; ValueError where the predictor has not what it needs."""
        if not self.fits(outputs):
            raise ValueError(f"score {self.name!r} needs {self.needs}, which only a single network has")
        return self.function(getattr(outputs, self.needs))

    def threshold(self, values: Floats, coverage: float, classes: int) -> float:
        """The smallest threshold under which a new row, like these, is answered with at least probability `coverage`.

        The ⌈(n + 1) · coverage⌉-th smallest of n values; where these are too few, and at 1, any row is answered.
        A row is answered where its score is at most the threshold.
        """
        place = rank(len(values), coverage)
        return self.highest(classes) if place is None else float(np.sort(values)[place - 1])

    def highest(self, classes: int) -> float:
        """A threshold that no score is above."""
        return min(self.limit(classes) + 1e-9, sys.float_info.max)  # JSON has no infinity


def rank(rows: int, coverage: float) -> int | None:
    """Which smallest of so many scores is the threshold; None: there are too few for this coverage, or it is 1."""
    place = max(1, int(np.ceil(coverage * (rows + 1) - 1e-9)))
    return place if coverage < 1 and place <= rows else None


def entropy(log_probabilities: Floats) -> Floats:
    """−Σ p log p in nats, with 0 log 0 = 0."""
    p = np.exp(log_probabilities)
    values: Floats = -(p * np.where(p > 0, log_probabilities, 0.0)).sum(axis=1)
    return values


def doubt(log_probabilities: Floats) -> Floats:
    """1 − the largest probability."""
    values: Floats = 1 - np.exp(log_probabilities.max(axis=1))
    return values


def energy(logits: Floats) -> Floats:
    """−log Σ exp f (Liu et al., NeurIPS 2020)."""
    highest = logits.max(axis=1)
    values: Floats = -(highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1)))
    return values


def negative_max(logits: Floats) -> Floats:
    """− the largest logit (Hendrycks et al., ICML 2022)."""
    values: Floats = -logits.max(axis=1)
    return values


def negative_norm(features: Floats) -> Floats:
    """−‖h‖₂ of the last hidden layer: what a network has not seen excites it less."""
    values: Floats = -np.sqrt(np.square(features, dtype=np.float64).sum(axis=1))
    return values


ENTROPY = Score("entropy", entropy, lambda classes: float(np.log(classes)))
for _score in (
    ENTROPY,
    Score("max_probability", doubt, lambda classes: 1 - 1 / classes),
    Score("energy", energy, needs="logits"),
    Score("max_logit", negative_max, needs="logits"),
    Score("feature_norm", negative_norm, lambda _classes: 0.0, needs="features"),
):
    SCORES.register(_score.name, _score, __name__)


def score_named(name: str) -> Score:
    """The registered score of this name; ValueError where there is none."""
    score: Score = SCORES[name]
    return score


def all_scores() -> list[Score]:
    """Every registered score, the entropy first."""
    return [score_named(name) for name in SCORES]
