"""The report of a run: one file with the run's figures, pictures and configuration, readable offline."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.evaluation.selective import SELECTIVE
from fedppd_ray.reports.about import about_table, dropped_clients
from fedppd_ray.reports.doubtful import doubtful_section
from fedppd_ray.reports.glossary import glossary
from fedppd_ray.reports.groups import group_tables
from fedppd_ray.reports.html import folded, html_page, html_table, named, pictures
from fedppd_ray.reports.sets import flag_rows, set_rows
from fedppd_ray.reports.sites import sites_section
from fedppd_ray.runs.files import write_atomically
from fedppd_ray.runs.journal import read_journal
from fedppd_ray.runs.layout import CONFIG, PLOTS, REPORT
from fedppd_ray.runs.remote import Location, open_to_read
from fedppd_ray.runs.run import evaluate_run
from fedppd_ray.runs.store import RunStore

_FEW_ROUNDS = 40  # that a page shows without being asked


def report_run(location: Location, examples: bool = True) -> str:
    """Write the report of a run, wherever it is; returns where the report is."""
    with open_to_read(location) as run:
        page = write_report(run.folder, evaluate_run(location), examples)
        run.push([*sorted((run.folder / PLOTS).glob("*.png")), page])
        return run.name_of(page)


def write_report(run: Path, evaluation: Evaluation | None = None, examples: bool = True) -> Path:
    """Evaluate the exported student (unless that was done), draw the plots, write report.html; returns its path.

    `examples`: show the most doubtful held-out rows, which not everybody who gets the page may be allowed to see.
    """
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.reports.plots import draw_plots

    store = RunStore(run)
    config = store.config()
    evaluation = evaluation or evaluate_run(run)
    history, clients, figures = store.history(), store.clients(), evaluation.figures
    plots = draw_plots(run / PLOTS, history, evaluation, clients, config.dataset.classes)
    text = html.escape((run / CONFIG).read_text(encoding="utf-8"))
    sections = (
        about_table(config, history, read_journal(run), len(clients)),
        f"<h2>The exported student</h2>{_figures_table(figures)}{pictures(plots)}",
        *(f"<h2>{html.escape(title)}</h2>{html_table(cells)}" for title, cells in group_tables(figures).items()),
        sites_section(run),
        doubtful_section(config, evaluation) if examples else "",
        f"<h2>Rounds</h2>{_rounds_table(history)}{dropped_clients(history)}",
        glossary(figures),
        f"<h2>Configuration</h2>{folded('Every key', f'<pre>{text}</pre>')}",
    )
    page = html_page(f"{config.name}: {config.method} on {config.data.name}", "".join(sections))
    write_atomically(run / REPORT, page.encode())
    return run / REPORT


def figure_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) pairs as people read them; shared by the terminal and the page."""
    rows = [
        ("round", str(figures["round"])),
        ("held-out rows", str(figures["rows"])),
        ("accuracy", f"{figures['accuracy']:.2f} %"),
        ("NLL", f"{figures['nll']:.4f} nats"),
        ("ECE", f"{figures['ece']:.2f} %"),
        ("MCE", f"{figures['mce']:.2f} %"),
        ("Brier", f"{figures['brier']:.4f}"),
    ]
    wrong = figures["misclassification_auroc"]
    rows.append(("misclassification AUROC", "no wrong answer" if wrong is None else f"{wrong:.3f}"))
    if "ood_auroc" in figures:
        shown = f"{figures['ood_auroc']:.3f} ± {figures['ood_auroc_sd']:.3f}"
        rows.append((f"OOD AUROC ({named(figures['ood'])})", shown))
    rows += more_rows(figures)
    abstention = figures.get("abstention")
    if abstention:
        unit = " nats" if abstention["score"] == "entropy" else ""
        rows.append((f"abstains above {abstention['score'].replace('_', ' ')}", f"{abstention['threshold']:.3f}{unit}"))
        rows.append(
            (
                "answered, wanted / reached",
                f"{100 * abstention['coverage_wanted']:.1f} / {abstention['coverage']:.1f} %",
            )
        )
        for key, name in (
            ("accuracy_answered", "accuracy of answers"),
            ("ood_abstained", "OOD rows abstained"),
        ):
            if abstention[key] is not None:
                rows.append((name, f"{abstention[key]:.2f} %"))
    return rows


def more_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Scaled figures beside the raw ones, selective and per-client figures, and what each score detects."""
    rows: list[tuple[str, str]] = []
    if "scaled" in figures:
        scaled = figures["scaled"]
        rows.append(("temperature", f"{figures['temperature']:.3f}"))
        rows += [(f"{name}, scaled", f"{scaled[key]:{form}}{unit}") for key, name, form, unit in _SCALED]
        rows += [(f"{name}, raw / scaled", f"{figures[key]:.2f} / {scaled[key]:.2f} %") for key, name in _ERRORS]
    if "aurc" in figures:
        at = " / ".join(f"{figures[f'accuracy_at_{share}']:.2f}" for share in SELECTIVE)
        rows.append(("AURC", f"{figures['aurc']:.2f} %"))
        rows.append((f"accuracy at {' / '.join(map(str, SELECTIVE))} % answered", f"{at} %"))
    if "fpr95" in figures:
        rows.append(("OOD FPR95, AUPR", f"{figures['fpr95']:.1f} %, {figures['aupr']:.3f}"))
    if found := figures.get("per_client"):
        for key, name in (("accuracy", "accuracy"), ("ece", "ECE")):
            shown = f"{found[key]['worst']:.2f} / {found[key]['p10']:.2f} %"
            rows.append((f"{name} per client, worst / 10th percentile", shown))
    if "teacher_accuracy" in figures:
        rows.append(("accuracy of the teacher", f"{figures['teacher_accuracy']:.2f} %"))
    rows += set_rows(figures) + flag_rows(figures) + _score_rows(figures) + _corruption_rows(figures)
    return rows


_SCALED = (("nll", "NLL", ".4f", " nats"), ("ece", "ECE", ".2f", " %"), ("brier", "Brier", ".4f", ""))
_ERRORS = (("adaptive_ece", "adaptive ECE"), ("classwise_ece", "class-wise ECE"))


def _score_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, found in figures.get("scores", {}).items():
        if found is None:
            rows.append((f"score {name}", "not available: no single network"))
            continue
        wrong = found["misclassification_auroc"]
        parts = ["" if wrong is None else f"wrong answers {wrong:.3f}"]
        parts += [f"{ood} {one['auroc']:.3f}" for ood, one in found.get("ood", {}).items()]
        rows.append((f"AUROC by {name.replace('_', ' ')}", ", ".join(filter(None, parts))))
    for name, shape in figures.get("ood_resized_from", {}).items():
        rows.append((f"{name} was resized from", "×".join(map(str, shape))))
    return rows


def _corruption_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, lines in figures.get("corruptions", {}).items():
        if name == "mean":
            shown = f"accuracy {lines['accuracy']:.2f} %, ECE {lines['ece']:.2f} / {lines['scaled_ece']:.2f} % scaled"
            rows.append(("corrupted, mean", shown))
        else:
            accuracies = " / ".join(f"{line['accuracy']:.1f}" for line in lines)
            rows.append((f"{name.replace('_', ' ')}, accuracy at severity 1 to 5", f"{accuracies} %"))
    return rows


def _figures_table(figures: Mapping[str, Any]) -> str:
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{value}</td></tr>" for name, value in figure_rows(figures))
    return f"<table>{cells}</table>"


def _rounds_table(history: Sequence[Mapping[str, Any]]) -> str:
    keys: tuple[str, ...] = (
        "round",
        "accuracy",
        "nll",
        "ece",
        "mce",
        "brier",
        "seconds",
        "clients",
        "failed",
        "megabytes",
    )
    keys += tuple(key for key in ("calibration_nll", "teacher_accuracy") if any(key in line for line in history))
    head = "".join(f"<th>{key}</th>" for key in keys)
    body = "".join("<tr>" + "".join(f"<td>{_cell(line.get(key))}</td>" for key in keys) + "</tr>" for line in history)
    table = f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
    return table if len(history) <= _FEW_ROUNDS else folded(f"All {len(history)} rounds", table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
