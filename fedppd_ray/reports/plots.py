"""The run's pictures."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, ever

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedppd_ray.evaluation.metrics import BINS, reliability
from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.evaluation.selective import risks
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.scores import entropy
from fedppd_ray.reports.html import named
from fedppd_ray.runs.files import write_atomically

matplotlib.rc("font", size=11)  # a page shows them at about three quarters of their size
_DPI = 160  # sharp on dense screens
BLUE, RED, GREY, GREEN = "#2b6cb0", "#c53030", "#718096", "#2f855a"


def draw_plots(
    folder: Path,
    history: Sequence[dict[str, Any]],
    evaluation: Evaluation,
    clients: Sequence[ClientInfo],
    classes: Sequence[str],
) -> list[Path]:
    """convergence, reliability, entropy, risk_coverage, who_holds_what: five PNG files."""
    folder.mkdir(exist_ok=True)
    return [
        save(folder / "convergence.png", _convergence(history)),
        save(folder / "reliability.png", _reliability(evaluation)),
        save(folder / "entropy.png", _entropy(evaluation)),
        save(folder / "risk_coverage.png", _risk_coverage(evaluation)),
        save(folder / "who_holds_what.png", _who_holds_what(clients, classes)),
    ]


def save(path: Path, figure: Figure) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())  # somebody may be looking at the last one
    return path


def new_axes(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _convergence(history: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = new_axes()
    known = [line for line in history if line["accuracy"] is not None]
    rounds = [line["round"] for line in known]
    marker = "o" if len(rounds) < 40 else None
    axes.plot(rounds, [line["accuracy"] for line in known], color=BLUE, marker=marker, markersize=3)
    axes.set(xlabel="round", ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("accuracy, %", color=BLUE)
    axes.grid(alpha=0.3)
    right = axes.twinx()
    right.spines["top"].set_visible(False)
    right.plot(rounds, [line["ece"] for line in known], color=RED, marker=marker, markersize=3)
    right.set_ylabel("expected calibration error, %", color=RED)
    right.set_ylim(bottom=0)
    axes.set_title("Convergence on held-out data")
    return figure


def _reliability(evaluation: Evaluation) -> Figure:
    bins = reliability(evaluation.log_probabilities, evaluation.labels)
    figure, axes = new_axes()
    centres = (np.arange(BINS) + 0.5) / BINS
    full = bins.count > 0
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="perfectly calibrated")
    axes.bar(centres[full], bins.accuracy[full], width=0.9 / BINS, color=BLUE, alpha=0.8, label="accuracy")
    axes.plot(
        bins.confidence[full],
        bins.accuracy[full],
        "o",
        color=RED,
        markersize=4,
        label="bin's mean confidence",
    )
    for centre, count, height in zip(centres[full], bins.count[full], bins.accuracy[full], strict=True):
        axes.annotate(str(count), (centre, height), ha="center", va="bottom", fontsize=8, color=GREY)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.08))
    axes.set_title(f"Reliability: ECE {evaluation.figures['ece']:.2f} %, MCE {evaluation.figures['mce']:.2f} %")
    axes.legend(loc="upper left", fontsize=9)
    return figure


def _entropy(evaluation: Evaluation) -> Figure:
    """The score that abstains, as it is served; of the entropy where it is not known."""
    name = evaluation.figures.get("score", "entropy")
    known, outside = evaluation.scores, evaluation.ood_scores
    if known is None or outside is None:
        name, known, outside = (
            "entropy",
            *map(entropy, (evaluation.log_probabilities, evaluation.ood_log_probabilities)),
        )
    right = evaluation.log_probabilities.argmax(axis=1) == evaluation.labels
    groups = [("right", known[right], GREEN), ("wrong", known[~right], RED)]
    if len(outside):
        groups.append((f"out of distribution ({named(evaluation.figures['ood'])})", outside, BLUE))
    figure, axes = new_axes()
    everything = np.concatenate([known, outside])
    edges = np.linspace(everything.min(), everything.max(), 41)
    if name == "entropy":
        edges = np.linspace(0, np.log(evaluation.log_probabilities.shape[1]), 41)
    for group, values, colour in groups:
        if len(values):
            weights = np.full(len(values), 1 / len(values))
            axes.hist(values, list(edges), weights=weights, alpha=0.5, color=colour, label=f"{group}: {len(values)}")
    abstention = evaluation.figures.get("abstention")
    if abstention:
        label = f"abstain above {abstention['threshold']:.2f}"
        axes.axvline(abstention["threshold"], color="black", linestyle=":", label=label)
    shown = "predictive entropy, nats" if name == "entropy" else name.replace("_", " ")
    axes.set(xlabel=shown, ylabel="share of the group")
    axes.set_title("What the student is unsure of")
    axes.legend(fontsize=9)
    return figure


def _risk_coverage(evaluation: Evaluation) -> Figure:
    """How many answers are wrong, by how many are given, surest first; and where the threshold is."""
    scores = evaluation.scores
    if scores is None:
        scores = entropy(evaluation.log_probabilities)
    wrong = (evaluation.log_probabilities.argmax(axis=1) != evaluation.labels).astype(np.int64)
    curve = 100 * risks(scores, wrong)
    answered = 100 * np.arange(1, len(curve) + 1) / len(curve)
    figure, axes = new_axes()
    axes.plot(answered, curve, color=BLUE, label="surest first")
    axes.axhline(curve[-1], color=GREY, linestyle="--", label=f"all answered: {curve[-1]:.1f} % wrong")
    abstention = evaluation.figures.get("abstention")
    if abstention and abstention["accuracy_answered"] is not None:
        at, risk = abstention["coverage"], 100 - abstention["accuracy_answered"]
        axes.plot([at], [risk], "o", color=RED, label=f"as served: {at:.1f} % answered, {risk:.1f} % wrong")
    axes.set(xlabel="answered, %", ylabel="wrong among the answered, %", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set_title("Risk and coverage on held-out data")
    return figure


def _who_holds_what(clients: Sequence[ClientInfo], classes: Sequence[str]) -> Figure:
    # A site may keep its counts to itself: an empty line.
    counts = np.array([info.class_counts or (0,) * len(classes) for info in clients])
    figure, axes = new_axes(6.4, max(3.0, min(12.0, 0.28 * len(clients) + 1.4)))
    axes.spines[:].set_visible(False)
    picture = axes.imshow(counts, aspect="auto", cmap="Blues")
    if len(classes) <= 20:
        axes.set_xticks(range(len(classes)), classes, rotation=45 if max(map(len, classes)) > 3 else 0)
    if len(clients) <= 30:
        axes.set_yticks(range(len(clients)), [f"{info.client} ({info.rows})" for info in clients])
    if counts.size <= 300:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if count > counts.max() / 2 else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(picture, label="training rows")
    axes.set_title("Who holds what")
    return figure
