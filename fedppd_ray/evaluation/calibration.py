"""What calibration rows decide: the temperature, the score, above which score to say "I don't know", the sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedppd_ray.config.schema import AUTO, EvaluationConfig
from fedppd_ray.evaluation.metrics import auroc
from fedppd_ray.evaluation.sets import calibrated_sets
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.abstention import abstention_card
from fedppd_ray.inference.drift import drift_card
from fedppd_ray.inference.ood_flag import ood_card
from fedppd_ray.inference.scores import ENTROPY, Labels, Outputs, Score, all_scores, score_named
from fedppd_ray.inference.temperature import fit_temperature, scaled


@dataclass(frozen=True)
class Calibration:
    temperature: float = 1.0
    score: Score = ENTROPY
    choice: dict[str, Any] = field(default_factory=dict)  # what `auto` chose by: score → its figures
    abstention: dict[str, Any] | None = None
    nll: float | None = None  # on the calibration rows, before scaling
    conformal: dict[str, Any] | None = None
    ood: dict[str, Any] | None = None
    drift: dict[str, Any] | None = None

    def entry(self) -> dict[str, Any]:
        """What a model card has of it, besides the abstention."""
        chosen = {"score_choice": self.choice} if self.choice else {}
        more = {"conformal": self.conformal, "ood": self.ood, "drift": self.drift}
        found = {key: value for key, value in more.items() if value}
        return {"temperature": self.temperature, "score": self.score.name, **chosen, **found}


def at_temperature(outputs: Outputs, temperature: float) -> Outputs:
    """Log-probabilities as they are served; logits and features stay as the network has them."""
    return replace(outputs, log_probabilities=scaled(outputs.log_probabilities, temperature))


def needs_network(config: EvaluationConfig) -> bool:
    """Whether log-probabilities alone are too little for the score that is asked for."""
    names = [config.score, *filter(None, [config.ood_flag.score])]
    return AUTO in names or any(score_named(name).needs != "log_probabilities" for name in names)


def calibrate(
    config: EvaluationConfig,
    known: Outputs,
    labels: Labels,
    outliers: Callable[[], Outputs],
    classes: Sequence[str] = (),
    clients: Sequence[ClientInfo] = (),
) -> Calibration:
    """`known` are calibration rows (none: temperature 1, no threshold); `outliers` is asked only to choose a score.

    `classes` are their names, `clients` who holds how many rows of each: for coverage by class and client.
    """
    if len(labels) == 0:
        return Calibration(score=ENTROPY if config.score == AUTO else score_named(config.score))
    temperature = fit_temperature(known.log_probabilities, labels)
    served = at_temperature(known, temperature)
    choice: dict[str, Any] = {}
    if config.score == AUTO:
        choice = _compared(served, labels, at_temperature(outliers(), temperature))
        score = score_named(max(choice, key=lambda name: float(choice[name]["mean"])))
    else:
        score = score_named(config.score)
    nll = -float(known.log_probabilities[np.arange(len(labels)), labels].mean())
    abstention = None
    if score.fits(served):
        abstention = abstention_card(served.log_probabilities, labels, config.coverage, score, score.of(served))
    names = classes or [str(number) for number in range(known.log_probabilities.shape[1])]
    sets = calibrated_sets(config.conformal, served.log_probabilities, labels, names, clients)
    flag, by = config.ood_flag, score_named(config.ood_flag.score or score.name)
    ood = ood_card(by, by.of(served), flag.false_alarms) if by.fits(served) else None
    drift = drift_card(served.log_probabilities, 0)
    return Calibration(temperature, score, choice, abstention, nll, sets, ood, drift)


def _compared(known: Outputs, labels: Labels, outliers: Outputs) -> dict[str, dict[str, float]]:
    """Score → how well it finds wrong answers and outliers; the first of equals wins, which is the entropy."""
    wrong = known.log_probabilities.argmax(axis=1) != labels
    result = {}
    for score in all_scores():
        if score.fits(known):
            inside, outside = score.of(known), score.of(outliers)
            found = {"outlier_auroc": auroc(outside, inside)}
            if wrong.any() and not wrong.all():
                found["misclassification_auroc"] = auroc(inside[wrong], inside[~wrong])
            result[score.name] = {**found, "mean": float(np.mean(list(found.values())))}
    return result
