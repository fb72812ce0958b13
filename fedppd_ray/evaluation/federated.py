"""What rows that clients keep back decide, where no others are: temperature and threshold, from sums alone.

The NLL's slope is a sum over rows, so the temperature of all rows together is found by asking for slopes. The threshold
is a quantile: clients count their scores in bins, and the bins are added up. It is the upper edge of the bin in which
the ⌈(n + 1) · coverage⌉-th smallest score lies: at most a bin (the `resolution` in the card) above it.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from fedppd_ray.config.schema import EvaluationConfig
from fedppd_ray.evaluation.calibration import Calibration
from fedppd_ray.inference.abstention import levels_of, too_few
from fedppd_ray.inference.questions import Answer, Question, register_question
from fedppd_ray.inference.scores import Floats, Labels, Outputs, Score, rank, score_named
from fedppd_ray.inference.temperature import COLDEST, HOTTEST, nll_slope, scaled

BINS = 1000
_GRID, _LOOKS = 100, 2  # slopes that are asked for at once, and how often: the temperature is right to 0.1 %
_SPREAD = 6.0  # standard deviations on each side, of a score that has no bounds

Ask = Callable[[Question], Mapping[str, Answer]]  # client → its answer


@register_question
class Slopes(Question):
    """Σ over rows of d NLL / dβ at these β, and of the NLL as it is."""

    kind: ClassVar[str] = "slopes"
    betas: tuple[float, ...]

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        log_p = outputs.log_probabilities
        slopes = [nll_slope(log_p, labels, beta) for beta in self.betas]
        return {"rows": len(labels), "slopes": slopes, "nll": -log_p[np.arange(len(labels)), labels].sum()}


class _OfScore(Question):
    score: str
    temperature: float

    def values(self, outputs: Outputs) -> Floats:
        served = Outputs(scaled(outputs.log_probabilities, self.temperature), outputs.logits, outputs.features)
        return score_named(self.score).of(served)


@register_question
class Moments(_OfScore):
    """Sums of a score and of its squares: where to put bins."""

    kind: ClassVar[str] = "moments"

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        values = self.values(outputs)
        return {"rows": len(values), "total": values.sum(), "squares": np.square(values).sum()}


@register_question
class Histogram(_OfScore):
    """How many rows, and how many wrong ones, have a score up to each of the edges and above the one before."""

    kind: ClassVar[str] = "histogram"
    low: float
    high: float

    def edges(self) -> Floats:
        found: Floats = np.linspace(self.low, self.high, BINS + 1)
        return found

    def answer(self, outputs: Outputs, labels: Labels) -> Mapping[str, Any]:
        places = np.searchsorted(self.edges(), self.values(outputs), side="left")
        wrong = outputs.log_probabilities.argmax(axis=1) != labels
        bins = BINS + 2  # the first up to `low`, the last above `high`
        return {"rows": np.bincount(places, minlength=bins), "wrong": np.bincount(places[wrong], minlength=bins)}


def calibrate_by_asking(config: EvaluationConfig, ask: Ask, classes: int) -> Calibration:
    """As `calibrate`, of all rows that clients keep back together; nobody sees one of them."""
    score = score_named(config.score)
    temperature, nll, rows = _temperature(ask)
    if rows == 0:
        return Calibration(score=score)
    if too_few(rows, config.coverage):
        return Calibration(temperature, score, nll=nll)
    return Calibration(
        temperature, score, {}, threshold_by_asking(config.coverage, score, temperature, ask, classes), nll
    )


def _temperature(ask: Ask) -> tuple[float, float | None, int]:
    """The zero of the summed slopes, between two β of a grid that is looked at again, finer."""
    low, high, nll, rows = 1 / HOTTEST, 1 / COLDEST, None, 0
    for _ in range(_LOOKS):
        betas = np.geomspace(low, high, _GRID)
        answers = ask(Slopes(betas=tuple(betas.tolist())))
        rows = int(_sum(answers, "rows"))
        if rows == 0:
            return 1.0, None, 0
        nll = float(_sum(answers, "nll")) / rows
        place = int((_sum(answers, "slopes") < 0).sum())  # it rises with β
        low, high = betas[max(0, place - 1)], betas[min(place, _GRID - 1)]
    return float(1 / (low * high) ** 0.5), nll, rows


def threshold_by_asking(coverage: float, score: Score, temperature: float, ask: Ask, classes: int) -> dict[str, Any]:
    low, high = _span(score, temperature, ask, classes)
    question = Histogram(score=score.name, temperature=temperature, low=low, high=high)
    answers = ask(question)
    counted, wrong = np.cumsum(_sum(answers, "rows")), np.cumsum(_sum(answers, "wrong"))
    rows = int(counted[-1])
    edges = np.append(question.edges(), score.highest(classes))

    def level(share: float) -> dict[str, float]:
        place = rank(rows, share)
        at = BINS + 1 if place is None else int(np.searchsorted(counted, place))
        return {"coverage": share, "threshold": float(edges[at]), "risk": 100 * float(wrong[at] / counted[at])}

    return {
        "score": score.name,
        "rows": rows,
        "clients": len(answers),
        "coverage": coverage,
        "threshold": level(coverage)["threshold"],
        "resolution": (high - low) / BINS,
        "table": [level(share) for share in levels_of(coverage)],
    }


def _span(score: Score, temperature: float, ask: Ask, classes: int) -> tuple[float, float]:
    """Where scores lie: what is known of them, or around their mean."""
    if score.name in ("entropy", "max_probability"):
        return 0.0, score.limit(classes)
    answers = ask(Moments(score=score.name, temperature=temperature))
    rows = float(_sum(answers, "rows"))
    mean = float(_sum(answers, "total")) / rows
    spread = _SPREAD * max(1e-6, float(_sum(answers, "squares")) / rows - mean**2) ** 0.5
    return mean - spread, mean + spread


def _sum(answers: Mapping[str, Answer], key: str) -> Any:
    """In the order of the clients' names: the same bits whoever answers first."""
    return sum((answers[client][key] for client in sorted(answers)), np.float64(0))
