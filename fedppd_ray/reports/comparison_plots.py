"""The pictures of a comparison: one line or panel a method."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedppd_ray.evaluation.metrics import BINS
from fedppd_ray.inference.scores import Floats
from fedppd_ray.reports.plots import BLUE, GREY, RED, new_axes, save
from fedppd_ray.studies.compared import COVERAGES, Comparison, Outcome, pooled_bins

_PALETTE = colormaps["tab10"]


def draw_comparison(folder: Path, comparison: Comparison) -> list[Path]:
    """convergence, reliability, risk_coverage: those that something is known for."""
    folder.mkdir(exist_ok=True)
    drawn = []
    if any(_evaluated(outcome) for outcome in comparison.outcomes):
        drawn.append(save(folder / "convergence.png", _convergence(comparison)))
    finished = [label for label in comparison.labels if comparison.finished(label)]
    if finished:
        drawn.append(save(folder / "reliability.png", _reliability(comparison, finished)))
        drawn.append(save(folder / "risk_coverage.png", _risk_coverage(comparison, finished)))
    return drawn


def _colour(comparison: Comparison, label: str) -> tuple[float, ...]:
    """The same in every picture, whichever methods are in it."""
    return _PALETTE(comparison.labels.index(label) % _PALETTE.N)


def _evaluated(outcome: Outcome) -> list[int]:
    return [line["round"] for line in outcome.history if line["accuracy"] is not None]


def _convergence(comparison: Comparison) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, key, name in ((left, "accuracy", "accuracy, %"), (right, "ece", "expected calibration error, %")):
        for label in comparison.labels:
            rounds, middle, width = _over_seeds(comparison.of(label), key)
            _line(axes, rounds, middle, width, label, _colour(comparison, label))
        axes.set(xlabel="round", ylabel=name)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8)
    figure.suptitle("Convergence on held-out data")
    return figure


def _over_seeds(outcomes: Sequence[Outcome], key: str) -> tuple[Sequence[float], Floats, Floats]:
    """Rounds, mean and standard deviation over the seeds that have evaluated the round (0 for one seed)."""
    by_round: dict[int, list[float]] = {}
    for outcome in outcomes:
        for line in outcome.history:
            if line[key] is not None:
                by_round.setdefault(line["round"], []).append(line[key])
    rounds = sorted(by_round)
    middle = np.array([np.mean(by_round[number]) for number in rounds])
    width = np.array([np.std(by_round[number], ddof=1) if len(by_round[number]) > 1 else 0.0 for number in rounds])
    return rounds, middle, width


def _line(axes: Axes, x: Sequence[float], middle: Floats, width: Floats, label: str, colour: tuple[float, ...]) -> None:
    marker = "o" if len(x) < 40 else None
    axes.plot(x, middle, color=colour, marker=marker, markersize=3, label=label)
    if width.any():
        axes.fill_between(x, middle - width, middle + width, color=colour, alpha=0.15, linewidth=0)


def _reliability(comparison: Comparison, labels: Sequence[str]) -> Figure:
    columns = min(4, len(labels))
    rows = -(-len(labels) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(2.9 * columns + 0.5, 2.9 * rows + 0.4), layout="constrained", squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    centres = (np.arange(BINS) + 0.5) / BINS
    for axes, label in zip(panels.flat, labels, strict=False):
        count, confidence, accuracy = (np.array(part) for part in pooled_bins(comparison.finished(label)))
        full = count > 0
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
        axes.bar(centres[full], accuracy[full], width=0.9 / BINS, color=BLUE, alpha=0.8)
        axes.plot(confidence[full], accuracy[full], "o", color=RED, markersize=3)
        ece = comparison.means(label)["ece"].mean
        axes.set_title(f"{label}: ECE {ece:.2f} %", fontsize=10)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(labels) :]:
        axes.set_visible(False)
    figure.supxlabel("confidence", fontsize=10)
    figure.supylabel("accuracy", fontsize=10)
    figure.suptitle("Reliability")
    return figure


def _risk_coverage(comparison: Comparison, labels: Sequence[str]) -> Figure:
    figure, axes = new_axes()
    answered = [100 * coverage for coverage in COVERAGES]
    for label in labels:
        risks = np.array([outcome.curves["risk"] for outcome in comparison.finished(label)])
        width = risks.std(axis=0, ddof=1) if len(risks) > 1 else np.zeros(len(answered))
        _line(axes, answered, risks.mean(axis=0), width, label, _colour(comparison, label))
    axes.set(xlabel="answered, % (lowest entropy first)", ylabel="wrong among the answered, %", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title("Risk and coverage on held-out data")
    return figure
