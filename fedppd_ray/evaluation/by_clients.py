"""Prediction sets and the OOD flag from rows that stay at the clients: what each is asked, and how answers combine.

One question for the sets (a histogram of scores, without classes), one for how they do there (counts by class). All
answers are sums over a client's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedppd_ray.config.conformal import ConformalConfig
from fedppd_ray.config.schema import EvaluationConfig
from fedppd_ray.evaluation.calibration import Calibration
from fedppd_ray.evaluation.federated import Ask, threshold_by_asking
from fedppd_ray.inference.abstention import too_few
from fedppd_ray.inference.conformal import (
    BINS,
    Rule,
    Tally,
    binned_mass,
    class_weights,
    conformal_card,
    conformal_level,
    edges,
    members,
)
from fedppd_ray.inference.drift import directions_for, drift_card
from fedppd_ray.inference.questions import Answer, Question, register_question
from fedppd_ray.inference.scores import Floats, Labels, Outputs, score_named
from fedppd_ray.inference.temperature import scaled


@register_question
class ClassCounts(Question):
    """The rows of each class: for sets where classes have other shares."""

    kind: ClassVar[str] = "class_counts"

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        return {"classes": np.bincount(labels, minlength=outputs.log_probabilities.shape[1])}


class _OfSets(Question):
    method: Literal["lac", "aps", "raps"]
    penalty: float = Field(ge=0)
    free_classes: int = Field(ge=0)
    temperature: float = Field(gt=0)

    def seen(self, outputs: Outputs) -> tuple[Rule, Floats]:
        rule = Rule(self.method, self.penalty, self.free_classes)
        return rule, scaled(outputs.log_probabilities, self.temperature)


@register_question
class ScoreMass(_OfSets):
    """Weight of rows in equal bins of the conformal score."""

    kind: ClassVar[str] = "score_mass"
    weights: tuple[float, ...]

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        rule, seen = self.seen(outputs)
        return {"rows": len(labels), "mass": binned_mass(rule, seen, labels, np.array(self.weights))}


@register_question
class Covered(_OfSets):
    """Of each class, the rows, those whose set holds it, and the sizes of their sets together."""

    kind: ClassVar[str] = "covered"
    limits: tuple[float, ...]

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        rule, seen = self.seen(outputs)
        inside = members(rule, seen, np.array(self.limits))
        classes = seen.shape[1]
        held = inside[np.arange(len(labels)), labels]
        return {
            "rows": np.bincount(labels, minlength=classes),
            "held": np.bincount(labels, held, classes),
            "size": np.bincount(labels, inside.sum(axis=1), classes),
        }


@register_question
class DriftCounts(Question):
    """Counts of entropies, predicted classes and projections: what served rows are compared with."""

    kind: ClassVar[str] = "drift_counts"
    temperature: float = Field(gt=0)

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        entry = drift_card(scaled(outputs.log_probabilities, self.temperature), 0)
        return {key: entry[key] for key in ("rows", "entropy", "classes", "projections")}


def drift_of_clients(classes: int, temperature: float, ask: Ask) -> dict[str, Any] | None:
    answers = ask(DriftCounts(temperature=temperature))
    if not answers:
        return None
    counts = {
        key: _sum(answers, key).astype(np.int64).tolist() for key in ("rows", "entropy", "classes", "projections")
    }
    return {**counts, "directions": directions_for(classes, 0).tolist()}


def with_sets(found: Calibration, config: EvaluationConfig, classes: Sequence[str], ask: Ask) -> Calibration:
    """What clients' rows decided so far, and sets and flag; unchanged where no client keeps enough rows back."""
    if found.nll is None:
        return found
    flag, by = config.ood_flag, score_named(config.ood_flag.score or found.score.name)
    wanted = threshold_by_asking(1 - flag.false_alarms, by, found.temperature, ask, len(classes))
    ood = {"score": by.name, "false_alarms": flag.false_alarms, "rows": wanted["rows"]}
    ood["threshold"] = None if too_few(wanted["rows"], 1 - flag.false_alarms) else wanted["threshold"]
    sets = sets_of_clients(config.conformal, classes, found.temperature, ask)
    return replace(found, conformal=sets, ood=ood, drift=drift_of_clients(len(classes), found.temperature, ask))


def sets_of_clients(
    config: ConformalConfig, classes: Sequence[str], temperature: float, ask: Ask
) -> dict[str, Any] | None:
    """The card's entry, from histograms; its thresholds are at most `resolution` too high, never too low."""
    rule = Rule(config.method, config.penalty, config.free_classes)
    settings = {"penalty": config.penalty, "free_classes": config.free_classes, "temperature": temperature}
    counts = np.zeros(len(classes)) if config.shares is None else _sum(ask(ClassCounts()), "classes")
    weights = class_weights(config.shares, classes, counts.astype(np.int64))
    finite = np.where(np.isfinite(weights), weights, 0.0)
    told = ask(ScoreMass(method=config.method, weights=tuple(finite.tolist()), **settings))
    if not told:
        return None
    tally = Tally(edges(rule, len(classes)), _sum(told, "mass"))
    rows = round(float(_sum(told, "rows")))
    entry = conformal_card(rule, tally, weights, config.confidence, rows, "clients")
    entry["resolution"] = rule.largest(len(classes)) / BINS
    level = conformal_level({"conformal": entry}, config.confidence)
    limits = np.broadcast_to(level.limits if level else np.inf, len(classes))
    # Sites take finite numbers alone; no score is above the largest.
    bounded = np.minimum(limits, rule.largest(len(classes)) + 1)
    found = ask(Covered(method=config.method, limits=tuple(bounded.tolist()), **settings))
    if found:
        entry["coverage"] = _groups(found, classes)
    return entry


def _groups(found: Mapping[str, Answer], classes: Sequence[str]) -> dict[str, Any]:
    rows, held, size = (_sum(found, key) for key in ("rows", "held", "size"))
    return {
        **_share(rows.sum(), held.sum(), size.sum()),
        "classes": {
            name: {"rows": int(rows[at]), **_share(rows[at], held[at], size[at])}
            for at, name in enumerate(classes)
            if rows[at]
        },
        "sites": {
            client: {"rows": int(a["rows"].sum()), **_share(a["rows"].sum(), a["held"].sum(), a["size"].sum())}
            for client, a in found.items()
        },
    }


def _share(rows: float, held: float, size: float) -> dict[str, float]:
    return {"coverage": 100 * float(held / rows), "size": float(size / rows)}


def _sum(answers: Mapping[str, Answer], key: str) -> Floats:
    total: Floats = np.sum([answer[key] for answer in answers.values()], axis=0)
    return total
