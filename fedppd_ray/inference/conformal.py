"""Prediction sets that hold the right class with a stated probability: split conformal prediction.

Every class y of a row x has a score, low where the student finds it likely. On n calibration rows the scores of the
right classes are known; the set of a new row holds each class whose score is at most the ⌈(n + 1)·confidence⌉-th
smallest of them. If the new row and the calibration rows could have come in any order, the right class is in the set
with at least that probability, whatever the network (Vovk et al., 2005). That is a promise about all rows together
(marginal): a class, or a site, by itself may be covered less.

- `lac`  1 − p_y: the smallest sets (Sadinle et al., 2019).
- `aps`  the mass of the classes before y, in falling order of probability: sets that grow with doubt (Romano et al.,
  2020, its coin fixed, so that equal questions have equal answers and no set is empty).
- `raps` `aps` plus penalty · (rank of y − free classes)₊: fewer very long sets (Angelopoulos et al., 2021).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.errors import ConfigError
from fedppd_ray.inference.scores import Floats, Labels

LEVELS = (*(round(0.01 * step, 2) for step in range(50, 100)), *(round(0.001 * step, 3) for step in range(991, 1000)))
BINS = 500  # of a tally without scores of single rows
GUARANTEE = "marginal"  # over all rows together: never of a class or a site by itself
_ROUNDING = 1e-9  # (n + 1)·confidence is meant exactly: 0.9 · 10 is 9

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """Which score; `penalty` and `free_classes` are read by `raps` alone."""

    kind: str
    penalty: float = 0.0
    free_classes: int = 0

    def scores(self, log_probabilities: Floats) -> Floats:
        """Rows × classes: the score of every class. Equally probable classes rank in their own order."""
        p = np.exp(log_probabilities)
        if self.kind == "lac":
            result: Floats = 1 - p
            return result
        order = np.argsort(-p, axis=1, kind="stable")
        ranked = np.take_along_axis(p, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        if self.kind == "raps":
            before += self.penalty * np.maximum(np.arange(1, p.shape[1] + 1) - self.free_classes, 0)
        result = np.empty_like(before)
        np.put_along_axis(result, order, before, axis=1)
        return result

    def of_labels(self, log_probabilities: Floats, labels: Labels) -> Floats:
        """The score of each row's own class."""
        found: Floats = self.scores(log_probabilities)[np.arange(len(labels)), labels]
        return found

    def largest(self, classes: int) -> float:
        """No score is above this."""
        return 1 + (self.penalty * max(0, classes - self.free_classes) if self.kind == "raps" else 0)


@dataclass(frozen=True)
class Tally:
    """How much weight of calibration rows has which score: `mass` of rows at most `values`, above the one before.

    Exact with one point for each score; of rows that stay at their clients, the bins of a histogram, whose upper edges
    are the points: then thresholds are rounded up, by at most one bin, and sets can only be larger.
    """

    values: Floats
    mass: Floats


def exact_tally(rule: Rule, log_probabilities: Floats, labels: Labels, weights: Floats) -> Tally:
    values, which = np.unique(rule.of_labels(log_probabilities, labels), return_inverse=True)
    return Tally(values, np.bincount(which, _finite(weights)[labels], len(values)).astype(np.float64))


def edges(rule: Rule, classes: int) -> Floats:
    """Upper edges of the bins, a hair above: division and multiplication need not round alike."""
    upper: Floats = rule.largest(classes) / BINS * np.arange(1, BINS + 1, dtype=np.float64) + _ROUNDING
    return upper


def binned_mass(rule: Rule, log_probabilities: Floats, labels: Labels, weights: Floats) -> Floats:
    """What a client answers: the weight of its rows in `BINS` equal bins of the score. Clients' answers add up."""
    share = rule.of_labels(log_probabilities, labels) / rule.largest(log_probabilities.shape[1])
    which = np.clip(np.ceil(share * BINS) - 1, 0, BINS - 1).astype(np.int64)
    return np.bincount(which, _finite(weights)[labels], BINS).astype(np.float64)


def _finite(weights: Floats) -> Floats:
    return np.where(np.isfinite(weights), weights, 0.0)


def class_weights(shares: Mapping[str, float] | None, classes: Sequence[str], counts: NDArray[np.int64]) -> Floats:
    """w_y = share where the student is used / share among calibration rows: all 1 where no shares are given.

    A class without calibration rows cannot be reweighted: its weight is 0 among them, and it is in every set.
    """
    if shares is None:
        return np.ones(len(classes))
    wanted = np.array([shares.get(name, 0.0) for name in classes])
    known = counts / max(1, counts.sum())
    return np.where(known > 0, wanted / np.where(known > 0, known, 1) / wanted.sum(), np.inf)


def thresholds(tally: Tally, confidence: float, weights: Floats) -> Floats:
    """For each class y the least t with Σ w(rows of score ≤ t) ≥ confidence · (Σ w(all rows) + w_y); ∞ where none has.

    With equal weights this is the ⌈(n + 1)·confidence⌉-th smallest score, for every class. With w = q(y)/p(y) the
    promise holds where classes have shares q instead of the calibration rows' p, and look alike otherwise (label shift;
    Podkopaev & Ramdas, UAI 2021).
    """
    reached = np.concatenate([np.cumsum(tally.mass), [np.inf]])
    needed = confidence * (tally.mass.sum() + weights)
    at = np.searchsorted(reached, needed - _ROUNDING * np.maximum(1, np.minimum(needed, 1e300)), side="left")
    limits: Floats = np.append(tally.values, np.inf)[np.minimum(at, len(tally.values))]
    return limits


def estimated_shares(confusion: NDArray[np.int64], predicted: Floats) -> Floats:
    """Class shares of unlabelled rows, from how often each class is predicted there (black-box shift estimation).

    `confusion[y, ŷ]` counts calibration rows. Solves μ = Cᵀ q for the shares q ≥ 0 (Lipton et al., ICML 2018), by least
    squares, clipped at 0: an estimate, so that sets weighted by it hold their promise approximately.
    """
    rates = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    found = np.clip(np.linalg.lstsq(rates.T, predicted / predicted.sum(), rcond=None)[0], 0, None)
    shares: Floats = found / found.sum() if found.sum() else np.full(len(found), 1 / len(found))
    return shares


def members(rule: Rule, log_probabilities: Floats, limits: Floats) -> Mask:
    """Rows × classes: who is in the set. The most probable class always is: an empty set would help nobody."""
    inside: Mask = rule.scores(log_probabilities) <= limits
    inside[np.arange(len(inside)), log_probabilities.argmax(axis=1)] = True
    return inside


def conformal_card(
    rule: Rule, tally: Tally, weights: Floats, confidence: float, rows: int, source: str = "calibration"
) -> dict[str, Any]:
    """What a model card has to know to answer any confidence: a threshold, or one for each class, by level."""
    table = []
    for level in sorted({*LEVELS, confidence}):
        limits = thresholds(tally, level, weights)
        if np.isinf(limits).all():
            break  # more than n / (n + 1): only the set of all classes is sure enough
        shown = limits[:1] if (limits == limits[0]).all() else limits
        table.append({"confidence": level, "thresholds": [None if np.isinf(t) else float(t) for t in shown]})
    settings = {"penalty": rule.penalty, "free_classes": rule.free_classes} if rule.kind == "raps" else {}
    weighted = {"weights": [float(w) if np.isfinite(w) else None for w in weights]} if (weights != 1).any() else {}
    return {
        "method": rule.kind,
        **settings,
        "guarantee": GUARANTEE,
        "rows": rows,
        "source": source,
        "confidence": confidence,
        **weighted,
        "table": table,
    }


@dataclass(frozen=True)
class Level:
    """A card's level for a wanted confidence."""

    confidence: float
    rule: Rule
    limits: Floats

    def members(self, log_probabilities: Floats) -> Mask:
        return members(self.rule, log_probabilities, self.limits)

    def described(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """What an answer says of its sets."""
        entry = card["conformal"]
        return {"method": self.rule.kind, "confidence": self.confidence} | {
            key: entry[key] for key in ("guarantee", "rows")
        }


def rule_of(entry: Mapping[str, Any]) -> Rule:
    return Rule(entry["method"], entry.get("penalty", 0.0), entry.get("free_classes", 0))


def conformal_level(card: Mapping[str, Any], confidence: float | None) -> Level | None:
    """The card's lowest level of at least this confidence; where none is that high, all classes."""
    if confidence is None:
        return None
    entry = card.get("conformal")
    if not entry:
        raise ConfigError(
            "confidence: this student was exported without calibration rows, so it has no prediction sets; train it "
            "with data.calibration above 0"
        )
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: {confidence:g} is not a share between 0 and 1")
    fitting = [row for row in entry["table"] if row["confidence"] >= confidence - _ROUNDING]
    if not fitting:
        return Level(confidence, rule_of(entry), np.array([math.inf]))
    row = min(fitting, key=lambda row: float(row["confidence"]))
    limits = np.array([math.inf if t is None else t for t in row["thresholds"]])
    return Level(row["confidence"], rule_of(entry), limits)
