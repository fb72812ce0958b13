"""A study of active learning on disk: results.json, table.md, the accuracy-against-labels plot and report.html."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedppd_ray.reports.html import markdown_page, study_page
from fedppd_ray.runs.files import write_atomically, write_json
from fedppd_ray.runs.layout import PLOTS, REPORT, RESULTS, TABLE
from fedppd_ray.studies.active import Study


def write_study(folder: Path, study: Study) -> None:
    """All that is known so far; called after every training."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.reports.active_plots import draw_study

    write_json(folder / RESULTS, results(study))
    write_atomically(folder / TABLE, table(study).encode())
    plots = draw_study(folder / PLOTS, study)
    page = study_page(study.title, cells(study), notes(study), plots, study.settings)
    write_atomically(folder / REPORT, page.encode())


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
    """A row per method and acquisition, a column a number of labels: accuracy (ECE)."""
    labels = sorted({point.labels for point in study.points})
    rows = [["accuracy % (ECE %) with … labels per client", *map(str, labels)]]
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
