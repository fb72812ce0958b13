"""A comparison on disk: results.json, table.md, plots and report.html, each replaced whole."""

import html
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedppd_ray.checkpoint.files import write_atomically, write_json
from fedppd_ray.evaluation.compared import COLUMNS, Comparison, Mean, Outcome
from fedppd_ray.evaluation.report import html_page, html_table, markdown_table, pictures

_NONE = "–"


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """All that is known so far; called after every run, so that a long comparison can be looked at."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.evaluation.compare_plots import draw_comparison

    write_json(folder / "results.json", results(comparison))
    write_atomically(folder / "table.md", table(comparison).encode())
    plots = draw_comparison(folder / "plots", comparison)
    write_atomically(folder / "report.html", _page(comparison, plots).encode())


def results(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "format": 1,
        "name": comparison.name,
        "clients": comparison.clients,
        "data": dict(comparison.data),
        "paper_rounds": comparison.paper_rounds,
        "methods": {
            label: {
                "runs": [_run(outcome) for outcome in comparison.of(label)],
                "means": {key: asdict(mean) for key, mean in comparison.means(label).items()},
                "paper": dict(comparison.paper.get(label, {})),
                "differs_from_first": list(comparison.differences.get(label, ())),
            }
            for label in comparison.labels
        },
    }


def _run(outcome: Outcome) -> dict[str, Any]:
    return {
        "seed": outcome.seed,
        "status": outcome.status,
        "reason": outcome.reason,
        "rounds": outcome.rounds,
        "rounds_done": len(outcome.history),
        "seconds": outcome.value("seconds"),
        "megabytes": outcome.value("megabytes"),
        **dict(outcome.figures),
    }


def table(comparison: Comparison) -> str:
    """The comparison for people: a table in Markdown and what one must know to read it."""
    text = markdown_table(cells(comparison))
    return f"# {comparison.name}\n\n{text}\n\n" + "\n".join(f"- {note}" for note in notes(comparison)) + "\n"


def cells(comparison: Comparison) -> list[list[str]]:
    """Heading and rows: our mean ± standard deviation, the paper's figure in brackets."""
    rows = [["method", *(heading for _, heading, _ in COLUMNS)]]
    for label in comparison.labels:
        means, paper = comparison.means(label), comparison.paper.get(label, {})
        rows.append([_who(comparison, label), *(_cell(means, paper, key, places) for key, _, places in COLUMNS)])
    return rows


def _who(comparison: Comparison, label: str) -> str:
    outcomes, finished = comparison.of(label), comparison.finished(label)
    failed = any(outcome.status == "failed" for outcome in outcomes)
    if len(finished) == len(outcomes):
        return label
    if not finished:
        return f"{label} (failed)" if failed else f"{label} (not finished)"
    return f"{label} ({len(finished)} of {len(outcomes)} seeds{', others failed' if failed else ''})"


def _cell(means: dict[str, Mean], paper: Any, key: str, places: int) -> str:
    ours = _NONE
    if key in means:
        mean = means[key]
        ours = f"{mean.mean:.{places}f}"
        if mean.deviation is not None:
            ours += f" ± {mean.deviation:.{places}f}"
    return f"{ours} ({paper[key]:.{places}f})" if key in paper else ours


def notes(comparison: Comparison) -> list[str]:
    seeds = sorted({outcome.seed for outcome in comparison.outcomes})
    part = comparison.data["partition"]
    rows = "all rows handed out" if part["rows_per_client"] is None else f"{part['rows_per_client']} rows a client"
    over = (
        f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    )
    lines = [
        f"{comparison.data['name']}, {part['kind']} partition, {comparison.clients} clients, {rows}, "
        f"{_rounds(comparison)}; {over}. Every method has the same clients' rows for the same seed.",
        "Seconds and megabytes are sums over all rounds, weights sent both ways. A method predicts as it is meant to, "
        "from its last checkpoint.",
    ]
    if any(comparison.paper.get(label) for label in comparison.labels):
        lines.append(_about_paper(comparison))
    for outcome in comparison.outcomes:
        if outcome.status == "failed":
            done = len(outcome.history)
            lines.append(f"{outcome.label}, seed {outcome.seed}: failed after {done} rounds: {outcome.reason}")
        elif outcome.status == "waiting":
            done = len(outcome.history)
            lines.append(f"{outcome.label}, seed {outcome.seed}: not finished, {done} of {outcome.rounds} rounds done")
    return lines


def _rounds(comparison: Comparison) -> str:
    wanted = sorted({outcome.rounds for outcome in comparison.outcomes})
    return f"{' or '.join(map(str, wanted))} {'round' if wanted == [1] else 'rounds'}"


def _about_paper(comparison: Comparison) -> str:
    text = f"In brackets: the paper's figure, from {comparison.paper_rounds} rounds."
    shorter = any(outcome.rounds < (comparison.paper_rounds or 0) for outcome in comparison.outcomes)
    return f"{text} Its runs are longer than ours ({_rounds(comparison)})." if shorter else text


def _page(comparison: Comparison, plots: Sequence[Path]) -> str:
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes(comparison))
    settings = "".join(
        f"<li>{html.escape(label)}: {html.escape('; '.join(lines)) or 'the first'}</li>"
        for label, lines in comparison.differences.items()
    )
    return html_page(
        comparison.name,
        f"{html_table(cells(comparison))}<ul>{listed}</ul>{pictures(plots)}"
        f"<h2>How the settings differ from the first method's</h2><ul>{settings}</ul>",
    )
