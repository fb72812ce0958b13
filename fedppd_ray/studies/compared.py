"""What a comparison knows: the outcome of every method and seed, and its means over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedppd_ray.evaluation.metrics import BINS, reliability
from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.inference.scores import entropy

Status = Literal["waiting", "finished", "failed"]

# The figures of the table: key, heading, decimals.
COLUMNS = (
    ("accuracy", "accuracy %", 2),
    ("nll", "NLL", 3),
    ("ece", "ECE %", 2),
    ("mce", "MCE %", 2),
    ("brier", "Brier", 3),
    ("ood_auroc", "OOD AUROC", 3),
    ("misclassification_auroc", "misclassification AUROC", 3),
    ("seconds", "seconds per round", 1),
    ("megabytes", "MB sent", 1),
)
# Those of a second table, where they are known: a dot leads into a section of the figures.
MORE = (
    ("temperature", "temperature", 2),
    ("scaled.nll", "NLL, scaled", 3),
    ("scaled.ece", "ECE %, scaled", 2),
    ("scaled.brier", "Brier, scaled", 3),
    ("adaptive_ece", "adaptive ECE %", 2),
    ("classwise_ece", "class-wise ECE %", 2),
    ("aurc", "AURC %", 2),
    ("accuracy_at_80", "accuracy % at 80 % answered", 2),
    ("accuracy_at_90", "at 90 %", 2),
    ("accuracy_at_95", "at 95 %", 2),
    ("fpr95", "OOD FPR95 %", 1),
    ("aupr", "OOD AUPR", 3),
    ("per_client.accuracy.worst", "worst client's accuracy %", 2),
    ("per_client.accuracy.p10", "10th percentile", 2),
    ("per_client.ece.worst", "worst client's ECE %", 2),
    ("per_client.ece.p10", "10th percentile", 2),
    ("teacher_accuracy", "teacher's accuracy %", 2),
    ("corruptions.mean.accuracy", "accuracy %, corrupted", 2),
    ("corruptions.mean.ece", "ECE %, corrupted", 2),
)
# Shares of the rows that are answered, in the risk–coverage curve.
COVERAGES = tuple(percent / 100 for percent in range(1, 101))


@dataclass(frozen=True)
class Outcome:
    """One method with one seed. `figures` and `curves` are there once it has finished."""

    label: str
    seed: int
    rounds: int  # wanted
    status: Status
    reason: str | None = None  # why it failed
    figures: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()  # the lines of metrics.jsonl, also of a run that has not finished

    def value(self, key: str) -> float | None:
        if key == "megabytes":
            return math.fsum(line[key] for line in self.history)
        if key == "seconds":
            # The median: a run that was paused, or shared its machine for a while, tells the same as one that was not.
            return statistics.median(line[key] for line in self.history) if self.history else None
        found: Any = self.figures
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return None if found is None else float(found)


@dataclass(frozen=True)
class Mean:
    """Over the finished seeds; `deviation` (n − 1 in the denominator) needs two."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Comparison:
    """Methods in the order of the table. `differences` says how a method's settings differ from the first's."""

    name: str
    settings: Mapping[str, Any]  # the configuration that all of them start from
    outcomes: Sequence[Outcome]
    differences: Mapping[str, Sequence[str]]
    rows: float | None = None  # what a client held, on average
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_rounds: int | None = None
    not_as_paper: Mapping[str, Sequence[str]] = field(default_factory=dict)  # `key: the authors' -> ours`
    also_there: Sequence[str] = ()  # finished runs of the same folder that were not asked for

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(outcome.label for outcome in self.outcomes))

    def of(self, label: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.label == label]

    def finished(self, label: str) -> list[Outcome]:
        return [outcome for outcome in self.of(label) if outcome.status == "finished"]

    def means(self, label: str) -> dict[str, Mean]:
        result = {}
        for key, _, _ in (*COLUMNS, *MORE):
            if mean := self.mean(label, key):
                result[key] = mean
        return result

    def mean(self, label: str, key: str) -> Mean | None:
        values = [value for outcome in self.finished(label) if (value := outcome.value(key)) is not None]
        if not values:
            return None
        return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def scores(self, label: str) -> list[str]:
        """The scores that something is known of."""
        known = [
            name
            for outcome in self.finished(label)
            for name, found in outcome.figures.get("scores", {}).items()
            if found
        ]
        return list(dict.fromkeys(known))


def curves_of(evaluation: Evaluation) -> dict[str, Any]:
    """What the plots need of the predictions, small enough for a JSON file.

    Per confidence bin the number of rows, and the sums of their confidences and right answers: sums can be pooled
    over seeds. And the risk (share of wrong answers, in percent) at each of `COVERAGES`.
    """
    bins = reliability(evaluation.log_probabilities, evaluation.labels)
    full = bins.count > 0
    return {
        "count": bins.count.tolist(),
        "confidence": np.where(full, bins.confidence * bins.count, 0.0).tolist(),
        "right": np.where(full, bins.accuracy * bins.count, 0.0).tolist(),
        "risk": _risks(evaluation),
    }


def _risks(evaluation: Evaluation) -> list[float]:
    """Of the share c of the rows with the lowest entropy (ties in the order of the rows), how many are wrong."""
    order = np.argsort(entropy(evaluation.log_probabilities), kind="stable")
    wrong = (evaluation.log_probabilities.argmax(axis=1) != evaluation.labels)[order]
    so_far = np.cumsum(wrong)
    answered = [max(1, math.ceil(coverage * len(order) - 1e-9)) for coverage in COVERAGES]
    return [100 * float(so_far[rows - 1]) / rows for rows in answered]


def pooled_bins(outcomes: Sequence[Outcome]) -> tuple[list[int], list[float], list[float]]:
    """Per confidence bin: rows, mean confidence and accuracy over all seeds together; NaN where empty."""
    sums = {
        key: np.sum([outcome.curves[key] for outcome in outcomes], axis=0) for key in ("count", "confidence", "right")
    }
    count = sums["count"]
    with np.errstate(invalid="ignore"):
        means = {key: np.where(count > 0, sums[key] / count, np.nan) for key in ("confidence", "right")}
    if len(count) != BINS:
        raise ValueError(f"{len(count)} bins, not {BINS}")
    return count.tolist(), means["confidence"].tolist(), means["right"].tolist()
