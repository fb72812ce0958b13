"""A study of active learning on disk: results.json, table.md, the accuracy-against-labels plot and report.html."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedppd_ray.checkpoint.files import write_atomically, write_json
from fedppd_ray.evaluation.report import markdown_page, study_page


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
    name: str
    settings: Mapping[str, Any]  # the configuration that all methods start from
    points: tuple[Point, ...]
    steps: int
    failed: Mapping[tuple[str, str], str] = field(default_factory=dict)  # method and acquisition → why

    @property
    def title(self) -> str:
        data, clients = self.settings["data"]["name"], self.settings["federation"]["clients"]
        return f"{self.name}: active learning on {data}, {clients} clients"

    @property
    def series(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((point.method, point.acquisition) for point in self.points))

    def of(self, method: str, acquisition: str) -> list[Point]:
        return [point for point in self.points if (point.method, point.acquisition) == (method, acquisition)]


def write_study(folder: Path, study: Study) -> None:
    """All that is known so far; called after every training."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.evaluation.active_plots import draw_study

    write_json(folder / "results.json", results(study))
    write_atomically(folder / "table.md", table(study).encode())
    plots = draw_study(folder / "plots", study)
    page = study_page(study.title, cells(study), notes(study), plots, study.settings)
    write_atomically(folder / "report.html", page.encode())


def results(study: Study) -> dict[str, Any]:
    """The study for programs."""
    return {
        "format": 1,
        "title": study.title,
        "settings": dict(study.settings),
        "steps": study.steps,
        "points": [asdict(point) for point in study.points],
        "failed": [{"method": who[0], "acquisition": who[1], "reason": why} for who, why in study.failed.items()],
    }


def table(study: Study) -> str:
    return markdown_page(study.title, cells(study), notes(study))


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


def notes(study: Study) -> list[str]:
    settings = study.settings
    done = len({point.step for point in study.points})
    return [
        f"{done} of {study.steps} trainings a series, each from the start: {settings['federation']['rounds']} rounds, "
        f"{settings['data']['partition']['kind']} partition, seed {settings['seed']}.",
        "entropy: every client labels the rows of its own pool that the global model is least sure of; random: as many "
        "at random. The first training is shared, and so is that of an emptied pool.",
        *(f"{method}, {acquisition}: failed: {why}" for (method, acquisition), why in study.failed.items()),
    ]
