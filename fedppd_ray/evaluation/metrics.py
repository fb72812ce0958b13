"""Metrics of a predictive distribution, from float64 log-probabilities.

ECE and MCE are written out because the definition here, 15 equal-width bins (lo, hi], differs from
torchmetrics' [lo, hi) exactly where it matters: at confidence 1. A test holds the two against each other away
from bin edges.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedppd_ray.inference.scores import ENTROPY, Floats, Labels, Score
from fedppd_ray.models.torchvision_import import import_torchvision
from fedppd_ray.seeding import numpy_generator_for

BINS = 15
_OOD_DRAWS = 5


@dataclass(frozen=True)
class Metrics:
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


def metrics_of(log_probabilities: Floats, labels: Labels) -> Metrics:
    rows = np.arange(len(labels))
    p = np.exp(log_probabilities)
    brier = (p**2).sum(axis=1) - 2 * p[rows, labels] + 1
    bins = reliability(log_probabilities, labels)
    full = bins.count > 0
    gaps = np.abs(bins.accuracy[full] - bins.confidence[full])
    return Metrics(
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


def adaptive_ece(log_probabilities: Floats, labels: Labels) -> float:
    """ECE over 15 bins of equally many rows (Nixon et al., 2019), in percent: no bin is a few rows' noise."""
    p = np.exp(log_probabilities)
    order = np.argsort(p.max(axis=1), kind="stable")
    gaps = p.max(axis=1)[order] - (p.argmax(axis=1) == labels)[order]
    return 100 * float(sum(abs(part.sum()) for part in np.array_split(gaps, BINS)) / len(labels))


def classwise_ece(log_probabilities: Floats, labels: Labels) -> float:
    """The mean over classes of the ECE of that class's probability (Kull et al., 2019), in percent."""
    gaps = _classwise(log_probabilities, labels)
    return 100 * float(gaps.sum() / (log_probabilities.shape[1] * len(labels)))


def classwise_gaps(log_probabilities: Floats, labels: Labels) -> Floats:
    """The ECE of every class's probability over all rows, in percent."""
    gaps = _classwise(log_probabilities, labels).reshape(log_probabilities.shape[1], BINS)
    result: Floats = 100 * gaps.sum(axis=1) / len(labels)
    return result


def _classwise(log_probabilities: Floats, labels: Labels) -> Floats:
    """Class by class and bin by bin: the gap between probability and share, times the rows."""
    p = np.exp(log_probabilities)
    classes = p.shape[1]
    # Gap of a bin times its rows: the sum over its rows of p − [y = class]. One bin number per class and bin.
    which = np.clip(np.ceil(p * BINS).astype(np.int64) - 1, 0, BINS - 1) + BINS * np.arange(classes)
    gaps = p - (labels[:, None] == np.arange(classes))
    sums = np.bincount(which.ravel(), weights=gaps.ravel(), minlength=BINS * classes)
    result: Floats = np.abs(sums)
    return result


def auroc(positive: Floats, negative: Floats) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN where one side is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    import_torchvision()  # torchmetrics imports it where it is installed
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(*_ranked(positive, negative)))


def aupr(positive: Floats, negative: Floats) -> float:
    """Average precision of finding the positives; NaN where one side is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    import_torchvision()
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(*_ranked(positive, negative)))


def _ranked(positive: Floats, negative: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """torchmetrics squashes scores outside [0, 1] by a sigmoid, which can merge neighbours: hand it ranks."""
    scores = np.concatenate([positive, negative])
    ranks = np.unique(scores, return_inverse=True)[1].astype(np.float64)
    target = np.repeat([1, 0], [len(positive), len(negative)])
    return torch.from_numpy(ranks / max(1.0, ranks.max())), torch.from_numpy(target)


def fpr95(outside: Floats, inside: Floats) -> float:
    """Share of foreign rows, in percent, that are taken for known where 95 % of the known rows are."""
    if len(outside) == 0 or len(inside) == 0:
        return float("nan")
    threshold = np.sort(inside)[max(1, int(np.ceil(0.95 * len(inside) - 1e-9))) - 1]
    return 100 * float((outside <= threshold).mean())


def misclassification_auroc(log_probabilities: Floats, labels: Labels, score: Score = ENTROPY) -> float:
    """Wrong answers are the positives."""
    uncertainty = score(log_probabilities)
    wrong = log_probabilities.argmax(axis=1) != labels
    return auroc(uncertainty[wrong], uncertainty[~wrong])


def ood_auroc(inside: Floats, outside: Floats, seed: int, score: Score = ENTROPY) -> tuple[float, float]:
    """Mean and standard deviation over 5 balanced draws; out-of-distribution rows are the positives.

    `inside` and `outside` are log-probabilities on in-distribution and out-of-distribution rows.
    """
    values = [auroc(unknown, known) for unknown, known in balanced_draws(score(outside), score(inside), seed)]
    return float(np.mean(values)), float(np.std(values, ddof=1))


def balanced_draws(outside: Floats, inside: Floats, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Five times as many of one side as of the other, without replacement."""
    generator = numpy_generator_for(seed, "ood/draws")
    size = min(len(inside), len(outside))
    for _ in range(_OOD_DRAWS):
        yield generator.choice(outside, size, replace=False), generator.choice(inside, size, replace=False)
