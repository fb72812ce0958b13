"""How a model does for each client: on test rows that are weighted to the client's own mix of classes.

What is known of clients is their class counts (`clients.json`); none of their rows is looked at. Clients that keep
their counts to themselves, as sites may, are left out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.evaluation.metrics import BINS
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.scores import Floats, Labels


def per_client(
    log_probabilities: Floats,
    labels: Labels,
    clients: Sequence[ClientInfo],
    answered: NDArray[np.bool_] | None = None,
) -> dict[str, Any]:
    """Accuracy and ECE in percent: the worst client's, the 10th percentile from the worst end, and the mean.

    And client by client, with the share of rows that the student declines, where it is known which it answers.
    """
    told = [info for info in clients if info.class_counts]
    if not told:
        return {}
    weights, asked = client_weights(labels, np.array([info.class_counts for info in told], np.float64))
    if not len(weights):
        return {}
    p = np.exp(log_probabilities)
    confidence, right = p.max(axis=1), (p.argmax(axis=1) == labels).astype(np.float64)
    which = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    in_bin = which[:, None] == np.arange(BINS)
    accuracy = 100 * weights @ right
    ece = 100 * np.abs((weights * (right - confidence)) @ in_bin).sum(axis=1)
    lines = [
        {"client": told[at].client, "rows": told[at].rows, "accuracy": float(one), "ece": float(other)}
        for at, one, other in zip(asked, accuracy, ece, strict=True)
    ]
    if answered is not None:
        for line, declined in zip(lines, 100 * weights @ ~answered, strict=True):
            line["abstained"] = float(declined)
    return {
        "clients": len(weights),
        "accuracy": {"worst": accuracy.min(), "p10": np.percentile(accuracy, 10), "mean": accuracy.mean()},
        "ece": {"worst": ece.max(), "p10": np.percentile(ece, 90), "mean": ece.mean()},
        "by_client": lines,
        "worst": lines[int(accuracy.argmin())]["client"],
    }


def client_weights(labels: Labels, counts: Floats) -> tuple[Floats, Labels]:
    """Clients × rows, each client's summing to 1, of clients whose classes have rows at all; and which these are."""
    present = np.bincount(labels, minlength=counts.shape[1])
    share = np.where(present > 0, counts / np.maximum(present, 1), 0.0)
    weights = share[:, labels]
    total = weights.sum(axis=1, keepdims=True)
    askable = total[:, 0] > 0
    return weights[askable] / total[askable], np.flatnonzero(askable)
