"""Everything there is to say about a run's exported student on held-out data."""

import math
from dataclasses import dataclass
from typing import Any

from fedppd_ray.checkpoint.export import read_student
from fedppd_ray.checkpoint.remote import Location, open_to_read
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.evaluation.metrics import Floats, Labels, entropy, misclassification_auroc, ood_auroc, score
from fedppd_ray.evaluation.predictive import HeldOut, network_predictor


@dataclass(frozen=True)
class Evaluation:
    """Figures, and the predictions they come from (for plots)."""

    figures: dict[str, Any]
    log_probabilities: Floats
    labels: Labels
    ood_log_probabilities: Floats


def evaluate_run(run: Location) -> Evaluation:
    """Test-set scores, misclassification and out-of-distribution AUROC, coverage of the abstention threshold."""
    with open_to_read(run) as opened:
        config = RunStore(opened.folder).config()
    card, student = read_student(run)
    held_out = HeldOut(config)
    predict = network_predictor(student)
    known = held_out.log_probabilities(predict, "test")
    labels = held_out.labels("test")
    unknown = held_out.log_probabilities(predict, "ood")
    figures: dict[str, Any] = {
        "name": card["name"],
        "round": card["round"],
        "rows": len(labels),
        **score(known, labels).as_dict(),
        "misclassification_auroc": _finite(misclassification_auroc(known, labels)),
    }
    if len(unknown):
        mean, deviation = ood_auroc(known, unknown, config.seed)
        figures |= {"ood": config.evaluation.ood, "ood_auroc": mean, "ood_auroc_sd": deviation}
    if card["abstention"]:
        figures["abstention"] = _abstention(card["abstention"], known, labels, unknown)
    return Evaluation(figures, known, labels, unknown)


def _abstention(card: dict[str, Any], known: Floats, labels: Labels, unknown: Floats) -> dict[str, Any]:
    """How the threshold that was chosen on calibration rows does on test and out-of-distribution rows."""
    answered = entropy(known) <= card["threshold"]
    right = known.argmax(axis=1) == labels
    return {
        "coverage_wanted": card["coverage"],
        "threshold": card["threshold"],
        "coverage": 100 * float(answered.mean()),
        "accuracy_answered": _finite(100 * float(right[answered].mean()) if answered.any() else math.nan),
        "ood_abstained": _finite(
            100 * float((entropy(unknown) > card["threshold"]).mean()) if len(unknown) else math.nan
        ),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a figure that is not defined (no wrong answer, say) is null."""
    return value if math.isfinite(value) else None
