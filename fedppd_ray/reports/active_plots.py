"""The picture of a study of active learning."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedppd_ray.reports.plots import new_axes, save
from fedppd_ray.studies.active import Study

_PALETTE = colormaps["tab10"]


def draw_study(folder: Path, study: Study) -> list[Path]:
    if not study.points:
        return []
    folder.mkdir(exist_ok=True)
    return [save(folder / "accuracy_against_labels.png", _accuracy(study))]


def _accuracy(study: Study) -> Figure:
    """One colour a method; solid where entropy chose, dashed where chance did."""
    figure, axes = new_axes()
    methods = list(dict.fromkeys(point.method for point in study.points))
    for method, acquisition in study.series:
        points = study.of(method, acquisition)
        axes.plot(
            [point.labels for point in points],
            [point.figures["accuracy"] for point in points],
            "o-" if acquisition == "entropy" else "o--",
            color=_PALETTE(methods.index(method) % _PALETTE.N),
            markersize=4,
            label=f"{method}, {acquisition}",
        )
    axes.set(xlabel="labelled rows of a client", ylabel="accuracy on held-out data, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title("Accuracy against labels")
    return figure
