"""A comparison on disk: results, table, plots and report, each replaced whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedppd_ray.reports.html import markdown_page, named, study_page
from fedppd_ray.reports.tidy import tidy
from fedppd_ray.runs.files import write_atomically, write_json
from fedppd_ray.runs.layout import PLOTS, REPORT, RESULTS, TABLE, TIDY
from fedppd_ray.studies.compared import COLUMNS, MORE, Comparison, Mean, Outcome
from fedppd_ray.studies.comparison import EARLY

_NONE = "–"
_PAPER_PLACES = {"brier": 2}  # where the paper has another number of decimals than our columns


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """All that is known so far; called after every run, so that a long comparison can be looked at."""
    # matplotlib is slow to import and only a report needs it.
    from fedppd_ray.reports.comparison_plots import draw_comparison

    write_json(folder / RESULTS, results(comparison))
    write_atomically(folder / TIDY, tidy(comparison).encode())
    write_atomically(folder / TABLE, table(comparison).encode())
    plots = draw_comparison(folder / PLOTS, comparison)
    differing = [f"{label}: {'; '.join(lines) or 'the first'}" for label, lines in comparison.differences.items()]
    page = study_page(
        comparison.name,
        cells(comparison),
        notes(comparison),
        plots,
        comparison.settings,
        differing,
        more_tables(comparison),
    )
    write_atomically(folder / REPORT, page.encode())


def results(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "format": 1,
        "name": comparison.name,
        "settings": dict(comparison.settings),
        "rows_a_client": comparison.rows,
        "paper_rounds": comparison.paper_rounds,
        "methods": {
            label: {
                "runs": [_run(outcome) for outcome in comparison.of(label)],
                "means": {key: asdict(mean) for key, mean in comparison.means(label).items()},
                "paper": dict(comparison.paper.get(label, {})),
                "not_as_paper": list(comparison.not_as_paper.get(label, ())),
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
        "seconds_a_round": outcome.value("seconds"),
        "megabytes": outcome.value("megabytes"),
        **dict(outcome.figures),
    }


def table(comparison: Comparison) -> str:
    """The comparison for people: a table in Markdown and what one must know to read it."""
    return markdown_page(comparison.name, cells(comparison), notes(comparison), more_tables(comparison))


def cells(comparison: Comparison) -> list[list[str]]:
    """Heading and rows: our mean ± standard deviation, the paper's figure in brackets."""
    rows = [["method", *(heading for _, heading, _ in COLUMNS)]]
    for label in comparison.labels:
        means, paper = comparison.means(label), comparison.paper.get(label, {})
        rows.append([_who(comparison, label), *(_cell(means, paper, key, places) for key, _, places in COLUMNS)])
    return rows


def more_tables(comparison: Comparison) -> dict[str, list[list[str]]]:
    """What later versions measure besides: nothing, where the figures are older."""
    means = {label: comparison.means(label) for label in comparison.labels}
    known = [column for column in MORE if any(column[0] in found for found in means.values())]
    if not known:
        return {}
    rows = [["method", *(heading for _, heading, _ in known)]]
    rows += [[label, *(_cell(means[label], {}, key, places) for key, _, places in known)] for label in means]
    return {"Scaled by temperature, selective, per client": rows, **_score_table(comparison)}


def _score_table(comparison: Comparison) -> dict[str, list[list[str]]]:
    """Every score of every method: how well it finds wrong answers, and the rows of each foreign set (AUROC)."""
    names = comparison.settings["evaluation"]["ood"] or []
    sets = [names] if isinstance(names, str) else list(names)
    keys = ["misclassification_auroc", *(f"ood.{name}.auroc" for name in sets)]
    rows = [["method, score", "wrong answers", *sets, *(["mean of the sets"] if len(sets) > 1 else [])]]
    keys += ["ood_auroc"] if len(sets) > 1 else []
    for label in comparison.labels:
        for score in comparison.scores(label):
            found = {key: mean for key in keys if (mean := comparison.mean(label, f"scores.{score}.{key}"))}
            rows.append([f"{label}, {score}", *(_cell(found, {}, key, 3) for key in keys)])
    return {"AUROC by score": rows} if len(rows) > 1 else {}


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
    return f"{ours} ({paper[key]:.{_PAPER_PLACES.get(key, places)}f})" if key in paper else ours


def notes(comparison: Comparison) -> list[str]:
    """What one must know to read the table."""
    seeds = sorted({outcome.seed for outcome in comparison.outcomes})
    over = (
        f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    )
    ood = named(comparison.settings["evaluation"]["ood"])
    lines = [
        f"{_who_holds_what(comparison)}, {_rounds(comparison)}; {over}. Every method has the same clients' rows for "
        f"the same seed.",
        f"A method predicts as it is meant to, from its last checkpoint. OOD AUROC: {ood or 'no set was asked for'}.",
        "Seconds: the median round by the clock, evaluation included, on whatever the machine had to do besides. "
        "MB: weights sent both ways, in all rounds.",
        *_about_evaluation(comparison),
        *_about_paper(comparison),
    ]
    for outcome in comparison.outcomes:
        done = len(outcome.history)
        if outcome.status == "failed":
            lines.append(f"{outcome.label}, seed {outcome.seed}: failed after {done} rounds: {outcome.reason}")
        elif outcome.status == "waiting":
            lines.append(f"{outcome.label}, seed {outcome.seed}: not finished, {done} of {outcome.rounds} rounds done")
    if comparison.also_there:
        lines.append(f"Finished in this folder too, not asked for: {', '.join(comparison.also_there)}.")
    return lines


def _about_evaluation(comparison: Comparison) -> list[str]:
    """How later figures came about, where there are any."""
    finished = [outcome for outcome in comparison.outcomes if "temperature" in outcome.figures]
    if not finished:
        return []
    lines = [
        "Scaled: one temperature, fitted on calibration rows (1 where there are none). Per client: test rows weighted "
        "to its mix of classes; a percentile counts from the worst."
    ]
    resized = {
        name: shape for outcome in finished for name, shape in outcome.figures.get("ood_resized_from", {}).items()
    }
    if resized:
        told = ", ".join(f"{name} ({'×'.join(map(str, shape))})" for name, shape in resized.items())
        lines.append(f"Resized to the data's shape: {told}.")
    early = [outcome for outcome in finished if outcome.label.endswith(EARLY)]
    if early:
        told = ", ".join(f"{outcome.label} seed {outcome.seed}: {outcome.figures['round']}" for outcome in early)
        lines.append(f"{EARLY}: the same run at the round of its lowest NLL on calibration rows ({told}).")
    lacking = [
        f"{label} ({', '.join(names)})"
        for label in comparison.labels
        if (names := [name for name in _asked_scores(comparison, label) if name not in comparison.scores(label)])
    ]
    if lacking:
        lines.append(f"No logits or features of a single network, so without these scores: {'; '.join(lacking)}.")
    return lines


def _asked_scores(comparison: Comparison, label: str) -> list[str]:
    return list(
        dict.fromkeys(name for outcome in comparison.finished(label) for name in outcome.figures.get("scores", {}))
    )


def _who_holds_what(comparison: Comparison) -> str:
    data = comparison.settings["data"]
    part = data["partition"]
    kind = part["kind"]
    if kind == "major_classes":
        kind += f" ({part['major']} major, {part['extra_per_class']} rows of every class)"
    elif kind == "dirichlet":
        kind += f" ({part['alpha']})"
    rows = "" if comparison.rows is None else f" with {comparison.rows:.0f} rows on average"
    return f"{data['name']}, {kind} partition, {comparison.settings['federation']['clients']} clients{rows}"


def _rounds(comparison: Comparison) -> str:
    wanted = sorted({outcome.rounds for outcome in comparison.outcomes})
    return f"{' or '.join(map(str, wanted))} {'round' if wanted == [1] else 'rounds'}"


def _about_paper(comparison: Comparison) -> list[str]:
    quoted = [label for label in comparison.labels if comparison.paper.get(label)]
    if not quoted:
        return []
    text = f"In brackets: the paper's figure, from {comparison.paper_rounds} rounds."
    if any(outcome.rounds < (comparison.paper_rounds or 0) for outcome in comparison.outcomes):
        text += f" Its runs are longer than ours ({_rounds(comparison)})."
    lines = [text]
    alike: dict[str, list[str]] = {}
    for label in quoted:
        alike.setdefault("; ".join(comparison.not_as_paper.get(label, ())), []).append(label)
    for how, labels in alike.items():
        if how:
            lines.append(f"Not as the authors ran it (theirs -> ours), {', '.join(labels)}: {how}")
    return lines
