"""A study of active learning on disk: results.json, table.md, the accuracy-against-labels plot and report.html."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.checkpoint.files import write_atomically, write_json
from fedppd_ray.evaluation.report import html_page, html_table, markdown_table, pictures


@dataclass(frozen=True)
class Point:
    """The figures of one training."""

    method: str
    acquisition: str
    step: int
    labels: int  # labelled rows of a client
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    title: str
    points: tuple[Point, ...]
    steps: int

    @property
    def series(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((point.method, point.acquisition) for point in self.points))

    def of(self, method: str, acquisition: str) -> list[Point]:
        return [point for point in self.points if (point.method, point.acquisition) == (method, acquisition)]


def write_study(folder: Path, study: Study) -> None:
    """All that is known so far; called after every training."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.evaluation.active_plots import draw_study

    write_json(folder / "results.json", {"format": 1, "title": study.title, "points": list(map(asdict, study.points))})
    write_atomically(folder / "table.md", table(study).encode())
    plots = draw_study(folder / "plots", study)
    page = html_page(study.title, f"{html_table(cells(study))}{pictures(plots)}<p>{_note(study)}</p>")
    write_atomically(folder / "report.html", page.encode())


def table(study: Study) -> str:
    return f"# {study.title}\n\n{markdown_table(cells(study))}\n\n{_note(study)}\n"


def cells(study: Study) -> list[list[str]]:
    """A row a method and acquisition, a column a number of labels: accuracy (ECE)."""
    labels = sorted({point.labels for point in study.points})
    rows = [["accuracy % (ECE %) with … labels a client", *map(str, labels)]]
    for method, acquisition in study.series:
        found = {point.labels: point.figures for point in study.of(method, acquisition)}
        rows.append([f"{method}, {acquisition}", *(_cell(found.get(count)) for count in labels)])
    return rows


def _cell(figures: Mapping[str, Any] | None) -> str:
    return "–" if figures is None else f"{figures['accuracy']:.2f} ({figures['ece']:.2f})"


def _note(study: Study) -> str:
    done = len({point.step for point in study.points})
    return (
        f"{done} of {study.steps} trainings a series, each from the start. entropy: every client labels the rows of "
        f"its own pool that the global model is least sure of; random: as many at random."
    )
