"""Temperature and prediction sets from rows that stay at the clients: what each is asked, and how answers combine.

Three questions for the temperature (slopes of the NLL on a grid, narrowed twice), one for the sets (a histogram of
scores, without classes), one for how they do there (counts). All answers are sums over a client's rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedppd_ray.config.conformal import ConformalConfig
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
from fedppd_ray.inference.questions import Answer, Question, register_question
from fedppd_ray.inference.scores import Floats, Labels, Outputs
from fedppd_ray.inference.temperature import COLDEST, HOTTEST, nll_slope, scaled

Ask = Callable[[Question], Mapping[str, Answer]]
_GRID, _NARROWINGS = 64, 3  # the last bracket of β is 2 · 10⁻⁵ of its value wide


@register_question
class Slopes(Question):
    """d NLL/dβ at each β = 1/T, and the number of rows of each class."""

    kind: ClassVar[str] = "nll_slopes"
    betas: tuple[Annotated[float, Field(gt=0)], ...] = Field(max_length=_GRID)

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        seen = outputs.log_probabilities
        slopes = [nll_slope(seen, labels, beta) for beta in self.betas]
        return {"slopes": slopes, "classes": np.bincount(labels, minlength=seen.shape[1])}


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


def temperature_of_clients(ask: Ask) -> tuple[float, Floats] | None:
    """The temperature of the smallest NLL over all clients' rows, and their class counts; None where nobody answers.

    The slope rises with β, so the grid brackets its zero; where there is none inside, the end of the range it is.
    """
    low, high = 1 / HOTTEST, 1 / COLDEST
    counts: Floats = np.zeros(0)
    for _ in range(_NARROWINGS):
        betas = np.geomspace(low, high, _GRID)
        answers = ask(Slopes(betas=tuple(betas.tolist())))
        if not answers:
            return None
        slopes, counts = _sum(answers, "slopes"), _sum(answers, "classes")
        at = int(np.clip(np.searchsorted(slopes >= 0, True), 1, _GRID - 1))
        low, high = float(betas[at - 1]), float(betas[at])
    return 1 / (low * high) ** 0.5, counts


def sets_of_clients(
    config: ConformalConfig, classes: Sequence[str], temperature: float, counts: Floats, ask: Ask
) -> dict[str, Any] | None:
    """The card's entry, from histograms; its thresholds are at most `resolution` too high, never too low."""
    rule = Rule(config.method, config.penalty, config.free_classes)
    settings = {"penalty": config.penalty, "free_classes": config.free_classes, "temperature": temperature}
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
