"""Where a model errs: class by class, and site by site where it is known whose a row is."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.evaluation.metrics import classwise_gaps, metrics_of
from fedppd_ray.evaluation.selective import finite
from fedppd_ray.inference.scores import Floats, Labels

Mask = NDArray[np.bool_]


def per_class(
    raw: Floats, served: Floats, labels: Labels, classes: Sequence[str], answered: Mask | None
) -> dict[str, Any]:
    """Recall, precision, calibration and abstention of every class, in percent, and the confusion matrix.

    `raw` and `served` are log-probabilities, the latter at the card's temperature; `answered` says which rows the
    student does not decline, None where it never does. Figures of a class without rows, or never answered, are null.
    """
    count = len(classes)
    confusion = np.zeros((count, count), np.int64)
    np.add.at(confusion, (labels, raw.argmax(axis=1)), 1)
    rows, said = confusion.sum(axis=1), confusion.sum(axis=0)
    right = np.diag(confusion)
    gaps, served_gaps = classwise_gaps(raw, labels), classwise_gaps(served, labels)
    lines: list[dict[str, Any]] = [
        {
            "class": name,
            "rows": int(rows[at]),
            "recall": _share(right[at], rows[at]),
            "precision": _share(right[at], said[at]),
            "ece": float(gaps[at]),
            "scaled_ece": float(served_gaps[at]),
            **({} if answered is None else {"abstained": _share((~answered)[labels == at].sum(), rows[at])}),
        }
        for at, name in enumerate(classes)
    ]
    known = [line for line in lines if line["recall"] is not None]
    return {
        "classes": lines,
        "balanced_accuracy": float(np.mean([line["recall"] for line in known])),
        "worst": min(known, key=lambda line: line["recall"])["class"],
        "confusion": confusion.tolist(),  # rows: what it is; columns: what the student says
    }


def per_site(
    raw: Floats, served: Floats, labels: Labels, sites: Mapping[str, Mask], answered: Mask | None
) -> dict[str, Any]:
    """Accuracy, mean recall, calibration and abstention on the rows of each site; the worst is that of accuracy."""
    lines = []
    for name, own in sites.items():
        found, scaled = metrics_of(raw[own], labels[own]), metrics_of(served[own], labels[own])
        line: dict[str, Any] = {
            "site": name,
            "rows": int(own.sum()),
            "accuracy": found.accuracy,
            "recall": mean_recall(raw[own], labels[own]),
            "nll": scaled.nll,
            "ece": found.ece,
            "scaled_ece": scaled.ece,
        }
        lines.append(line if answered is None else {**line, "abstained": 100 * float((~answered)[own].mean())})
    return {"sites": lines, "worst": min(lines, key=lambda line: line["accuracy"])["site"]}


def mean_recall(log_probabilities: Floats, labels: Labels) -> float:
    """Over the classes that there are."""
    right = log_probabilities.argmax(axis=1) == labels
    return 100 * float(np.mean([right[labels == each].mean() for each in np.unique(labels)]))


def _share(part: Any, whole: Any) -> float | None:
    return finite(100 * float(part) / float(whole)) if whole else None
