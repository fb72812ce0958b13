"""Everything there is to say about a predictor on held-out data: a run's exported student, or a method's own."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedppd_ray.checkpoint.export import read_student
from fedppd_ray.checkpoint.remote import Location, open_to_read
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.config import Config
from fedppd_ray.evaluation.metrics import Floats, Labels, entropy, misclassification_auroc, ood_auroc, score
from fedppd_ray.evaluation.predictive import HeldOut, Predictor, network_predictor


@dataclass(frozen=True)
class Evaluation:
    """Figures, and the predictions they come from (for plots)."""

    figures: dict[str, Any]
    log_probabilities: Floats
    labels: Labels
    ood_log_probabilities: Floats


def evaluate_run(run: Location) -> Evaluation:
    """The figures of the exported student, and what its abstention threshold comes to."""
    with open_to_read(run) as opened:
        config = RunStore(opened.folder).config()
    card, student = read_student(run)
    seen = evaluate_predictor(config, network_predictor(student))
    figures = {"name": card["name"], "round": card["round"], **seen.figures}
    if card["abstention"]:
        figures["abstention"] = _abstention(
            card["abstention"], seen.log_probabilities, seen.labels, seen.ood_log_probabilities
        )
    return replace(seen, figures=figures)


def evaluate_predictor(config: Config, predict: Predictor, device: torch.device | str = "cpu") -> Evaluation:
    """Test-set scores, misclassification and out-of-distribution AUROC, whoever predicts."""
    held_out = HeldOut(config, device)
    known = held_out.log_probabilities(predict, "test")
    labels = held_out.labels("test")
    unknown = held_out.log_probabilities(predict, "ood")
    figures: dict[str, Any] = {
        "rows": len(labels),
        **score(known, labels).as_dict(),
        "misclassification_auroc": _finite(misclassification_auroc(known, labels)),
    }
    if len(unknown):
        mean, deviation = ood_auroc(known, unknown, config.seed)
        figures |= {"ood": config.evaluation.ood, "ood_auroc": mean, "ood_auroc_sd": deviation}
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
