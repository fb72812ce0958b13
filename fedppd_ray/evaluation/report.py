"""`report.html`: one file with the run's figures, pictures and configuration, readable offline."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fedppd_ray.checkpoint.files import write_atomically, write_json
from fedppd_ray.checkpoint.remote import Location, open_to_read
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.core.types import ClientInfo
from fedppd_ray.errors import CheckpointError
from fedppd_ray.evaluation.run import Evaluation, evaluate_run

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1a202c}
h1,h2{line-height:1.2} table{border-collapse:collapse;margin:1rem 0} td,th{padding:.25rem .8rem;text-align:right;
border-bottom:1px solid #e2e8f0} th:first-child,td:first-child{text-align:left} img{max-width:100%;height:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem} .wide{grid-column:1/-1}
pre{background:#f7fafc;padding:1rem;overflow:auto} .scroll{overflow-x:auto}
"""


_WIDE = 800  # pixels


def save_clients(run: Path, clients: Sequence[ClientInfo]) -> None:
    """Keep the clients' counts beside the run, so that a report can be made without them."""
    write_json(run / "clients.json", {"clients": [asdict(info) for info in clients]})


def load_clients(run: Path) -> list[ClientInfo]:
    try:
        values = json.loads((run / "clients.json").read_text(encoding="utf-8"))["clients"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{run / 'clients.json'}: cannot be read ({error}); resume the run to mend it") from None
    return [ClientInfo(value["client"], value["rows"], tuple(value["class_counts"])) for value in values]


def report_run(location: Location) -> str:
    """Write the report of a run, wherever it is; returns where the report is."""
    with open_to_read(location) as run:
        page = write_report(run.folder, evaluate_run(location))
        run.push([*sorted((run.folder / "plots").glob("*.png")), page])
        return run.name_of(page)


def write_report(run: Path, evaluation: Evaluation | None = None) -> Path:
    """Evaluate the exported student (unless that was done), draw the plots, write report.html; returns its path."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.evaluation.plots import draw_plots

    store = RunStore(run)
    config = store.config()
    evaluation = evaluation or evaluate_run(run)
    plots = draw_plots(run / "plots", store.history(), evaluation, load_clients(run), config.dataset.classes)
    text = html.escape((run / "config.yaml").read_text(encoding="utf-8"))
    page = html_page(
        f"{config.name}: {config.method} on {config.data.name}",
        f"<h2>The exported student</h2>{_figures_table(evaluation.figures)}{pictures(plots)}"
        f"<h2>Rounds</h2>{_rounds_table(store.history())}<h2>Configuration</h2><pre>{text}</pre>",
    )
    write_atomically(run / "report.html", page.encode())
    return run / "report.html"


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
        rows.append((f"OOD AUROC ({figures['ood']})", f"{figures['ood_auroc']:.3f} ± {figures['ood_auroc_sd']:.3f}"))
    abstention = figures.get("abstention")
    if abstention:
        rows.append(("abstains above entropy", f"{abstention['threshold']:.3f} nats"))
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


def _figures_table(figures: Mapping[str, Any]) -> str:
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{value}</td></tr>" for name, value in figure_rows(figures))
    return f"<table>{cells}</table>"


def _rounds_table(history: Sequence[Mapping[str, Any]]) -> str:
    keys = ("round", "accuracy", "nll", "ece", "mce", "brier", "seconds", "clients", "failed", "megabytes")
    head = "".join(f"<th>{key}</th>" for key in keys)
    body = "".join("<tr>" + "".join(f"<td>{_cell(line.get(key))}</td>" for key in keys) + "</tr>" for line in history)
    failures = "".join(
        f"<li>round {line['round']}, {html.escape(failure['client'])}: {html.escape(failure['reason'])}</li>"
        for line in history
        for failure in line["failures"]
    )
    lost = f"<h3>Clients dropped</h3><ul>{failures}</ul>" if failures else ""
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>{lost}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """A heading and rows; the first column is words, the others are numbers."""
    head, *rows = cells
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def html_table(cells: Sequence[Sequence[str]]) -> str:
    head, *rows = cells
    first = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{first}</tr>{body}</table></div>"


def pictures(paths: Sequence[Path]) -> str:
    """PNG files as part of the page itself, side by side; one of several panels has a line of its own."""
    images = ""
    for path in paths:
        content = path.read_bytes()
        width = int.from_bytes(content[16:20], "big")  # of a PNG, always there
        images += f'<img{" class=wide" if width > _WIDE else ""} alt="{path.stem.replace("_", " ")}" '
        images += f'src="data:image/png;base64,{base64.b64encode(content).decode()}">'
    return f"<div class=plots>{images}</div>"


def markdown_page(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Several runs in one table, and what one must know to read it."""
    listed = "\n".join(f"- {note}" for note in notes)
    return f"# {title}\n\n{markdown_table(cells)}\n\n{listed}\n"


def study_page(
    title: str,
    cells: Sequence[Sequence[str]],
    notes: Sequence[str],
    plots: Sequence[Path],
    settings: Mapping[str, Any],
    differences: Sequence[str] = (),
) -> str:
    """The same as a page, with pictures and the configuration."""
    differing = f"<h2>How the settings differ from the first method's</h2>{_html_list(differences)}"
    text = html.escape(yaml.safe_dump(dict(settings), sort_keys=False))
    return html_page(
        title,
        f"{html_table(cells)}{_html_list(notes)}{pictures(plots)}{differing if differences else ''}"
        f"<h2>The configuration</h2><pre>{text}</pre>",
    )


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def html_page(title: str, body: str) -> str:
    """A whole page that needs nothing but itself. `title` is text, `body` is HTML."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )
