"""Figures class by class, client by client and site by site: tables that the terminal and the page share."""

from collections.abc import Mapping, Sequence
from typing import Any

Cells = list[list[str]]  # a heading and rows
_NONE = "–"
_MOST_CLASSES = 20  # of a confusion matrix that people still read

_CLASS = (("recall", "recall %"), ("precision", "precision %"), ("ece", "ECE %"), ("scaled_ece", "ECE %, scaled"))
_SITE = (("accuracy", "accuracy %"), ("recall", "mean recall %"), ("ece", "ECE %"), ("scaled_ece", "ECE %, scaled"))
_ABSTAINED = ("abstained", "abstained %")


def group_tables(figures: Mapping[str, Any]) -> dict[str, Cells]:
    """Heading → table, of those that something is known for."""
    tables: dict[str, Cells] = {}
    classes, clients, sites = (figures.get(key) or {} for key in ("per_class", "per_client", "per_site"))
    if "by_client" in clients:
        title = f"Per client: test rows weighted to its mix of classes; worst: {clients['worst']}"
        tables[title] = _cells(clients["by_client"], "client", (*_SITE, _ABSTAINED), "training rows")
    if "sites" in sites:
        title = f"Per site, on its own rows, none of them trained on; worst: {sites['worst']}"
        tables[title] = _cells(sites["sites"], "site", (*_SITE, _ABSTAINED), "rows")
    if "classes" in classes:
        title = f"Per class: mean recall {classes['balanced_accuracy']:.2f} %; worst: {classes['worst']}"
        tables[title] = _cells(classes["classes"], "class", (*_CLASS, _ABSTAINED), "rows")
        names = [line["class"] for line in classes["classes"]]
        if len(names) <= _MOST_CLASSES:
            head = ["it is ↓, the student says →", *names]
            tables["Confusion"] = [
                head,
                *([name, *map(str, row)] for name, row in zip(names, classes["confusion"], strict=True)),
            ]
    return tables


def _cells(
    lines: Sequence[Mapping[str, Any]], who: str, columns: Sequence[tuple[str, str]], rows_heading: str
) -> Cells:
    known = [(key, heading) for key, heading in columns if any(key in line for line in lines)]
    head = [who, rows_heading, *(heading for _, heading in known)]
    return [
        head,
        *([str(line[who]), str(line["rows"]), *(_figure(line.get(key)) for key, _ in known)] for line in lines),
    ]


def _figure(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"
