"""Whether rows that are served still look like the calibration rows: what an export records, and two-sample tests.

Recorded are counts alone: of entropies, of predicted classes, and of a few random projections of log-probabilities, in
bins that are fixed beforehand. A window of served rows is counted likewise, and compared by tests that are exact if its
rows and the calibration rows could have come in any order:

- entropy: Kolmogorov–Smirnov, the exact distribution (bins only make it smaller);
- classes: for each, the hypergeometric chance of so few or so many in the window; the index of population stability
  says how large the change is;
- projections: for each, the maximum mean discrepancy (Gaussian kernels) against permutations of window and reference.

Each third has a third of the level, divided again by its number of classes or projections (Bonferroni).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.inference.scores import Floats, entropy
from fedppd_ray.seeding import numpy_generator_for

PROJECTIONS = 4
_ENTROPY_BINS, _PROJECTION_BINS = 64, 48
_SOFTNESS = 8.0  # nats: log-probabilities, centred, are squashed by tanh(·/8), so that projections are bounded
_WIDTHS = (0.03, 0.1, 0.3)  # of the kernels, on projections within −1 … 1
_COARSE = 0.004  # p-values of permutations that decide nothing any more
_EXCEEDED = 20  # permutations as extreme as the window, after which no more are drawn (Besag & Clifford, 1991)

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Tallies:
    """Rows, counted in fixed bins; those of two parts add up to those of the whole."""

    entropy: Counts
    classes: Counts
    projections: Counts  # projections × bins

    def __add__(self, other: "Tallies") -> "Tallies":
        return Tallies(self.entropy + other.entropy, self.classes + other.classes, self.projections + other.projections)

    @property
    def rows(self) -> int:
        return int(self.classes.sum())


def directions_for(classes: int, seed: int) -> Floats:
    """Projections × classes, each of absolute sum 1."""
    drawn = numpy_generator_for(seed, "drift").normal(size=(PROJECTIONS, classes))
    directions: Floats = drawn / np.abs(drawn).sum(axis=1, keepdims=True)
    return directions


def tallied(log_probabilities: Floats, directions: Floats) -> Tallies:
    classes = log_probabilities.shape[1]
    spread = np.maximum(log_probabilities, -1e3)
    squashed = np.tanh((spread - spread.mean(axis=1, keepdims=True)) / _SOFTNESS)
    return Tallies(
        _counts(entropy(log_probabilities) / math.log(classes), _ENTROPY_BINS),
        np.bincount(log_probabilities.argmax(axis=1), minlength=classes),
        np.array([_counts((one + 1) / 2, _PROJECTION_BINS) for one in (squashed @ directions.T).T]),
    )


def _counts(shares: Floats, bins: int) -> Counts:
    """Of numbers within 0 … 1."""
    return np.bincount(np.clip(shares * bins, 0, bins - 1).astype(np.int64), minlength=bins)


def drift_card(log_probabilities: Floats, seed: int) -> dict[str, Any]:
    """The entry of a model card, from calibration rows as they are served."""
    directions = directions_for(log_probabilities.shape[1], seed)
    found = tallied(log_probabilities, directions)
    return {
        "rows": found.rows,
        "directions": directions.tolist(),
        "entropy": found.entropy.tolist(),
        "classes": found.classes.tolist(),
        "projections": found.projections.tolist(),
    }


def reference_of(entry: Mapping[str, Any]) -> tuple[Tallies, Floats]:
    """What a card has recorded, and the directions of its projections."""
    known = (np.array(entry[key], np.int64) for key in ("entropy", "classes", "projections"))
    return Tallies(*known), np.array(entry["directions"], np.float64)


@dataclass(frozen=True)
class Finding:
    """One of the three: how large the change is, how surprising (p, corrected for its parts), and the level."""

    statistic: float
    p: float
    level: float

    @property
    def drifted(self) -> bool:
        return self.p <= self.level


def compared(reference: Tallies, window: Tallies, level: float, generator: np.random.Generator) -> dict[str, Finding]:
    """The three tests; without drift, the chance that any of them speaks is at most `level`."""
    third = level / 3
    index = stability_index(reference.classes, window.classes)
    entropies = Finding(*_kolmogorov_smirnov(reference.entropy, window.entropy), third)
    classes = Finding(index, _class_chance(reference, window), third)
    # Permutations are dear where the level is low; where others have spoken, a few tell enough.
    finest = _COARSE if entropies.drifted or classes.drifted else third
    found = _discrepancies(reference.projections, window.projections, finest, generator)
    return {"entropy": entropies, "classes": classes, "projections": Finding(*found, third)}


def _kolmogorov_smirnov(known: Counts, seen: Counts) -> tuple[float, float]:
    from scipy.stats import ks_2samp  # takes a moment to import, and only who looks for drift needs it

    bins = np.arange(len(known))
    found = ks_2samp(np.repeat(bins, known), np.repeat(bins, seen), method="auto")
    return float(found.statistic), float(found.pvalue)


def stability_index(known: Counts, seen: Counts) -> float:
    """Population stability: Σ (a − e) log(a/e) of class shares, half a row added to each class."""
    e, a = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (known, seen))
    return float(((a - e) * np.log(a / e)).sum())


def _class_chance(reference: Tallies, window: Tallies) -> float:
    """The least two-sided chance of a class, times the number of classes that there are rows of."""
    from scipy.stats import hypergeom

    both = reference.classes + window.classes
    law = hypergeom(int(both.sum()), both, window.rows)
    tails = np.minimum(law.cdf(window.classes), law.sf(window.classes - 1))
    return float(min(1.0, 2 * tails[both > 0].min() * (both > 0).sum()))


def _kernel(bins: int) -> Floats:
    places = (np.arange(bins) + 0.5) * 2 / bins - 1
    distance = (places[:, None] - places[None]) ** 2
    kernel: Floats = np.mean([np.exp(-distance / (2 * width**2)) for width in _WIDTHS], axis=0)
    return kernel


def _discrepancies(known: Counts, seen: Counts, level: float, generator: np.random.Generator) -> tuple[float, float]:
    """The largest MMD, and the least chance times the number of projections."""
    kernel = _kernel(known.shape[1])
    found = [_permuted(a, b, kernel, level / len(known), generator) for a, b in zip(known, seen, strict=True)]
    return max(mmd for mmd, _ in found), min(1.0, len(known) * min(p for _, p in found))


def _permuted(
    known: Counts, seen: Counts, kernel: Floats, level: float, generator: np.random.Generator
) -> tuple[float, float]:
    """MMD, and its p-value by sequential Monte Carlo: few draws where nothing is the matter."""
    both, n, m = known + seen, int(known.sum()), int(seen.sum())
    used = np.flatnonzero(both)
    small = kernel[np.ix_(used, used)]

    def square(drawn: Counts) -> Floats:
        gap = drawn / m - (both[used] - drawn) / n
        squares: Floats = np.einsum("ri,ij,rj->r", gap, small, gap, optimize=True)
        return squares

    observed = float(square(seen[None, used])[0])
    most = math.ceil(1 / level)
    exceeded = drawn = 0
    while drawn < most and exceeded < _EXCEEDED:
        count = min(max(200, drawn), most - drawn, 5000)
        rows = generator.multivariate_hypergeometric(both[used], m, size=count, method="marginals")
        above = np.cumsum(square(rows) >= observed - 1e-12)
        enough = np.searchsorted(above, _EXCEEDED - exceeded)
        if enough < count:
            return math.sqrt(observed), _EXCEEDED / (drawn + int(enough) + 1)
        exceeded, drawn = exceeded + int(above[-1]), drawn + count
    return math.sqrt(observed), (1 + exceeded) / (1 + drawn)
