"""Metrics of a predictive distribution, from float64 log-probabilities.

ECE and MCE are written out because the definition here, 15 equal-width bins (lo, hi], differs from
torchmetrics' [lo, hi) exactly where it matters: at confidence 1. A test holds the two against each other away
from bin edges.
"""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.seeding import numpy_generator_for

BINS = 15
_OOD_DRAWS = 5

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Scores:
    """Accuracy, ECE and MCE in percent; Brier in [0, 2]; NLL in nats."""

    accuracy: float
    nll: float
    ece: float
    mce: float
    brier: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Reliability:
    """Per confidence bin: how many rows, their mean confidence and their accuracy (NaN where empty)."""

    count: NDArray[np.int64]
    confidence: Floats
    accuracy: Floats


def entropy(log_probabilities: Floats) -> Floats:
    """−Σ p log p in nats, with 0 log 0 = 0."""
    p = np.exp(log_probabilities)
    values: Floats = -(p * np.where(p > 0, log_probabilities, 0.0)).sum(axis=1)
    return values


def score(log_probabilities: Floats, labels: Labels) -> Scores:
    rows = np.arange(len(labels))
    p = np.exp(log_probabilities)
    brier = (p**2).sum(axis=1) - 2 * p[rows, labels] + 1
    bins = reliability(log_probabilities, labels)
    full = bins.count > 0
    gaps = np.abs(bins.accuracy[full] - bins.confidence[full])
    return Scores(
        accuracy=100 * float((p.argmax(axis=1) == labels).mean()),
        nll=-float(log_probabilities[rows, labels].mean()),
        ece=100 * float((gaps * bins.count[full]).sum() / len(labels)),
        mce=100 * float(gaps.max()),
        brier=float(brier.mean()),
    )


def reliability(log_probabilities: Floats, labels: Labels) -> Reliability:
    """Top-label confidence in 15 equal-width bins (lo, hi]."""
    p = np.exp(log_probabilities)
    confidence = p.max(axis=1)
    right = (p.argmax(axis=1) == labels).astype(np.float64)
    which = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    count = np.bincount(which, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return Reliability(
            count,
            np.bincount(which, weights=confidence, minlength=BINS) / count,
            np.bincount(which, weights=right, minlength=BINS) / count,
        )


def auroc(positive: Floats, negative: Floats) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN where one side is empty."""
    from fedppd_ray.torchvision_import import import_torchvision

    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    import_torchvision()  # torchmetrics imports it where it is installed
    from torchmetrics.functional.classification import binary_auroc

    scores = np.concatenate([positive, negative])
    # torchmetrics squashes scores outside [0, 1] by a sigmoid, which can merge neighbours: hand it ranks.
    ranks = np.unique(scores, return_inverse=True)[1].astype(np.float64)
    target = np.repeat([1, 0], [len(positive), len(negative)])
    scaled = torch.from_numpy(ranks / max(1.0, ranks.max()))
    return float(binary_auroc(scaled, torch.from_numpy(target)))


def misclassification_auroc(log_probabilities: Floats, labels: Labels) -> float:
    """Wrong answers are the positives, entropy is the score."""
    uncertainty = entropy(log_probabilities)
    wrong = log_probabilities.argmax(axis=1) != labels
    return auroc(uncertainty[wrong], uncertainty[~wrong])


def ood_auroc(inside: Floats, outside: Floats, seed: int) -> tuple[float, float]:
    """Mean and standard deviation over 5 balanced draws; out-of-distribution rows are the positives.

    Arguments are log-probabilities on in-distribution and out-of-distribution rows; entropy is the score.
    """
    generator = numpy_generator_for(seed, "ood/draws")
    known, unknown = entropy(inside), entropy(outside)
    size = min(len(known), len(unknown))
    values = [
        auroc(generator.choice(unknown, size, replace=False), generator.choice(known, size, replace=False))
        for _ in range(_OOD_DRAWS)
    ]
    return float(np.mean(values)), float(np.std(values, ddof=1))
