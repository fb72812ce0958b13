"""Everything there is to say about a predictor on held-out data: a run's exported student, or a method's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import resized_from
from fedppd_ray.data.parts import Split
from fedppd_ray.evaluation.calibration import Calibration, at_temperature, calibrate
from fedppd_ray.evaluation.corrupted import corruption_figures
from fedppd_ray.evaluation.metrics import adaptive_ece, classwise_ece, metrics_of
from fedppd_ray.evaluation.per_class import Mask, per_class, per_site
from fedppd_ray.evaluation.per_client import per_client
from fedppd_ray.evaluation.selective import SELECTIVE, finite, score_figures
from fedppd_ray.evaluation.sets import set_figures
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.abstention import score_of, temperature_of
from fedppd_ray.inference.held_out import HeldOut, joined_outputs, outputs_on
from fedppd_ray.inference.ood_flag import is_foreign
from fedppd_ray.inference.predictor import Predictor
from fedppd_ray.inference.scores import Floats, Labels, Outputs, Score, all_scores, score_named

# What is told of the chosen score by itself, besides the AUROCs; it is in the table of all scores too.
_OF_THE_SCORE = ("aurc", *(f"accuracy_at_{share}" for share in SELECTIVE), "fpr95", "aupr")


@dataclass(frozen=True)
class Evaluation:
    """Figures, and the predictions they come from (for plots), as the network makes them: not scaled."""

    figures: dict[str, Any]
    log_probabilities: Floats
    labels: Labels
    ood_log_probabilities: Floats
    # The chosen score at the temperature, as it is served, of test and out-of-distribution rows.
    scores: Floats | None = None
    ood_scores: Floats | None = None


def evaluate_predictor(
    config: Config,
    predict: Predictor,
    device: torch.device | str = "cpu",
    *,
    card: Mapping[str, Any] | None = None,
    clients: Sequence[ClientInfo] = (),
) -> Evaluation:
    """Test-set figures, raw and scaled, and what every score detects, whoever predicts.

    Temperature and score are those of the `card`, or chosen on calibration rows. `clients`: who holds how many rows of
    each class, for figures per client.
    """
    held_out = HeldOut(config, device)
    known, labels = held_out.outputs(predict, "test"), held_out.labels("test")
    foreign = {name: held_out.outputs(predict, f"ood/{name}") for name in held_out.ood_names}
    calibration = _of_card(card) if card else _calibrated(config, held_out, predict)
    score, temperature = calibration.score, calibration.temperature
    raw = {score.name: score_figures(score, known, labels, foreign, config.seed) for score in all_scores()}
    names = config.evaluation.ood_names
    served = at_temperature(known, temperature)
    served_foreign = {name: at_temperature(outputs, temperature) for name, outputs in foreign.items()}
    answered = _answered(calibration, served)
    figures = {
        "rows": len(labels),
        **_figures(known, labels, raw.get(score.name), names),
        **_beyond(known, labels, raw.get(score.name)),
        "score": score.name,
        "temperature": temperature,
        "scaled": {
            **_figures(served, labels, score_figures(score, served, labels, served_foreign, config.seed), names),
            **_calibration_errors(served, labels),
        },
        "scores": raw,
        **_notes(config, calibration),
    }
    if card and card.get("conformal"):
        figures["sets"] = set_figures(card, served.log_probabilities, labels, clients)
    if card and card.get("ood"):
        figures["ood_flag"] = _flagged(card, served, served_foreign)
    logs, classes = (known.log_probabilities, served.log_probabilities), config.dataset.classes
    figures["per_class"] = per_class(*logs, labels, classes, answered)
    if clients:
        figures["per_client"] = per_client(known.log_probabilities, labels, clients, answered)
    if config.evaluation.corruptions:
        figures["corruptions"] = corruption_figures(held_out, predict, temperature)
    outside = np.concatenate(
        [np.empty((0, len(config.dataset.classes))), *(o.log_probabilities for o in foreign.values())]
    )
    return Evaluation(
        figures,
        known.log_probabilities,
        labels,
        outside,
        _scores(score, [served]),
        _scores(score, served_foreign.values()),
    )


def _flagged(card: Mapping[str, Any], served: Outputs, foreign: Mapping[str, Outputs]) -> dict[str, Any]:
    """Test rows that are called foreign, and foreign rows that are, in percent."""
    score = score_named(card["ood"]["score"])
    shares = {name: 100 * float(is_foreign(card, score.of(outputs)).mean()) for name, outputs in foreign.items()}
    return {
        "score": score.name,
        "false_alarms_wanted": 100 * card["ood"]["false_alarms"],
        "false_alarms": 100 * float(is_foreign(card, score.of(served)).mean()),
        "flagged": shares,
    }


def evaluate_rows(
    parts: Mapping[str, Split], info: DatasetInfo, predict: Predictor, card: Mapping[str, Any], seed: int = 0
) -> Evaluation:
    """The figures of an exported student on labelled rows from anywhere, by the name of where each part is from."""
    outputs = {name: outputs_on(predict, part.images, info, torch.device("cpu")) for name, part in parts.items()}
    known = joined_outputs(list(outputs.values()))
    labels = np.concatenate([part.labels for part in parts.values()])
    calibration = _of_card(card)
    served, score = at_temperature(known, calibration.temperature), calibration.score
    raw, logs = score_figures(score, known, labels, {}, seed), (known.log_probabilities, served.log_probabilities)
    answered = _answered(calibration, served)
    figures = {
        "rows": len(labels),
        **_figures(known, labels, raw, ()),
        **_beyond(known, labels, raw),
        "score": score.name,
        "temperature": calibration.temperature,
        "scaled": {**_figures(served, labels, None, ()), **_calibration_errors(served, labels)},
        "per_class": per_class(*logs, labels, info.classes, answered),
    }
    if len(parts) > 1:
        whose = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
        sites = {name: whose == at for at, name in enumerate(parts)}
        figures["per_site"] = per_site(*logs, labels, sites, answered)
    outside = np.empty((0, len(info.classes)))
    return Evaluation(figures, known.log_probabilities, labels, outside, _scores(score, [served]), np.empty(0))


def _of_card(card: Mapping[str, Any]) -> Calibration:
    return Calibration(temperature_of(card), score_named(score_of(card)), abstention=card["abstention"])


def _answered(calibration: Calibration, served: Outputs) -> Mask | None:
    """Which rows are not declined; None where no threshold was set, or the score is not known of these."""
    if not calibration.abstention or not calibration.score.fits(served):
        return None
    answered: Mask = calibration.score.of(served) <= calibration.abstention["threshold"]
    return answered


def _calibrated(config: Config, held_out: HeldOut, predict: Predictor) -> Calibration:
    known = held_out.outputs(predict, "calibration")
    return calibrate(
        config.evaluation, known, held_out.labels("calibration"), lambda: held_out.outputs(predict, "outliers")
    )


def _figures(seen: Outputs, labels: Labels, detected: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, Any]:
    """What the first version had: accuracy and calibration, and the AUROCs of the chosen score."""
    figures: dict[str, Any] = metrics_of(seen.log_probabilities, labels).as_dict()
    figures["misclassification_auroc"] = detected["misclassification_auroc"] if detected else None
    if detected and "ood_auroc" in detected:
        figures["ood"] = names[0] if len(names) == 1 else list(names)
        figures |= {key: detected[key] for key in ("ood_auroc", "ood_auroc_sd")}
    return figures


def _calibration_errors(seen: Outputs, labels: Labels) -> dict[str, float]:
    return {
        "adaptive_ece": adaptive_ece(seen.log_probabilities, labels),
        "classwise_ece": classwise_ece(seen.log_probabilities, labels),
    }


def _beyond(seen: Outputs, labels: Labels, detected: Mapping[str, Any] | None) -> dict[str, Any]:
    chosen = {key: detected[key] for key in _OF_THE_SCORE if key in detected} if detected else {}
    return {**_calibration_errors(seen, labels), **chosen}


def _notes(config: Config, calibration: Calibration) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if calibration.choice:
        notes["score_choice"] = calibration.choice
    shapes = {name: resized_from(name, config.dataset) for name in config.evaluation.ood_names}
    if resized := {name: list(shape) for name, shape in shapes.items() if shape}:
        notes["ood_resized_from"] = resized
    return notes


def _scores(score: Score, seen: Any) -> Floats | None:
    parts = list(seen)
    if not all(score.fits(outputs) for outputs in parts):
        return None
    return np.concatenate([np.empty(0), *(score.of(outputs) for outputs in parts)])


def with_card(seen: Evaluation, card: Mapping[str, Any]) -> Evaluation:
    """The figures of an exported student, and what its abstention threshold comes to."""
    figures = {"name": card["name"], "round": card["round"], **seen.figures}
    if card["abstention"]:
        figures["abstention"] = _abstention(card, seen)
    return replace(seen, figures=figures)


def _abstention(card: Mapping[str, Any], seen: Evaluation) -> dict[str, Any]:
    """How the threshold that was chosen on calibration rows does on test and out-of-distribution rows."""
    chosen = card["abstention"]
    if seen.scores is None or seen.ood_scores is None:
        raise ValueError(f"score {score_of(card)!r} is not known of these predictions")
    answered = seen.scores <= chosen["threshold"]
    right = seen.log_probabilities.argmax(axis=1) == seen.labels
    declined = seen.ood_scores > chosen["threshold"]
    return {
        "score": score_of(card),
        "coverage_wanted": chosen["coverage"],
        "threshold": chosen["threshold"],
        "coverage": 100 * float(answered.mean()),
        "accuracy_answered": finite(100 * float(right[answered].mean()) if answered.any() else math.nan),
        "ood_abstained": finite(100 * float(declined.mean()) if len(declined) else math.nan),
    }
