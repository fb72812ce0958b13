"""Evaluation of a run, its plots and its page."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.inference.scores import entropy
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.reports.run import figure_rows, write_report
from fedppd_ray.runs.run import evaluate_run
from fedppd_ray.runs.store import RunStore

PLOTS = ["convergence", "entropy", "reliability", "risk_coverage", "who_holds_what"]


@pytest.fixture(scope="module")
def reported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reported") / "run"
    shutil.copytree(finished_run, run)
    assert write_report(run) == run / "report.html"
    return run


@pytest.fixture(scope="module")
def evaluation(finished_run: Path) -> Evaluation:
    return evaluate_run(finished_run)


def test_evaluate_repeats_the_figures_of_the_exported_round(finished_run: Path, evaluation: Evaluation) -> None:
    last = RunStore(finished_run).history()[-1]
    for name in ("round", "accuracy", "nll", "ece", "mce", "brier"):
        assert evaluation.figures[name] == last[name]
    assert metrics_of(evaluation.log_probabilities, evaluation.labels).accuracy == last["accuracy"]


def test_evaluate_says_all_there_is_to_say(evaluation: Evaluation) -> None:
    figures = evaluation.figures
    assert figures["rows"] == 1000
    assert figures["ood"] == "glyphs"
    assert 0 <= figures["ood_auroc"] <= 1
    assert figures["ood_auroc_sd"] >= 0
    assert 0 <= figures["misclassification_auroc"] <= 1
    json.dumps(figures, allow_nan=False)


def test_the_abstention_figures_are_those_of_the_threshold(evaluation: Evaluation) -> None:
    figures = evaluation.figures["abstention"]
    temperature = evaluation.figures["temperature"]
    answered = entropy(scaled(evaluation.log_probabilities, temperature)) <= figures["threshold"]
    right = evaluation.log_probabilities.argmax(1) == evaluation.labels
    assert figures["coverage"] == pytest.approx(100 * answered.mean())
    assert figures["accuracy_answered"] == pytest.approx(100 * right[answered].mean())
    strangers = entropy(scaled(evaluation.ood_log_probabilities, temperature))
    assert figures["ood_abstained"] == pytest.approx(100 * (strangers > figures["threshold"]).mean())


def test_the_report_has_five_plots(reported: Path) -> None:
    plots = sorted((reported / "plots").iterdir())
    assert [path.name for path in plots] == [f"{name}.png" for name in PLOTS]
    for path in plots:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 5000


def test_the_page_needs_nothing_but_itself(reported: Path) -> None:
    page = (reported / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)\s*=\s*"?([^">\s]+)', page)
    assert len(sources) == 5 + 12  # plots, and the most doubtful rows
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|<script|url\(", page)


def test_the_page_shows_figures_rounds_and_configuration(reported: Path, evaluation: Evaluation) -> None:
    page = (reported / "report.html").read_text(encoding="utf-8")
    rows = figure_rows(evaluation.figures)
    for name, value in rows:
        assert f"<td>{name}</td><td>{value}</td>" in page
    rounds = page[page.index("<h2>Rounds</h2>") : page.index("<h2>What the measures mean")]
    assert rounds.count("<tr><td>") == 2
    assert "extra_per_class: 10" in page


def test_the_page_escapes_what_comes_from_outside(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0]["failures"] = [{"client": "client-01", "reason": "<script>alert(1)</script>"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = (run / "config.yaml").read_text().replace("name: tiny", "name: <b>tiny</b>")
    (run / "config.yaml").write_text(config)
    page = write_report(run).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<td>client-01</td><td>1</td><td>1</td><td>&lt;script&gt;" in page


def test_a_report_is_made_without_ood_calibration_or_full_evaluation(
    tiny: Callable[..., Config], train_run: Callable[..., object], tmp_path: Path
) -> None:
    config = tiny(federation={"rounds": 2}, evaluation={"every": 2, "ood": None}, data={"calibration": 0})
    train_run(config, tmp_path / "run")
    figures = evaluate_run(tmp_path / "run").figures
    assert "ood_auroc" not in figures
    assert "abstention" not in figures
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "OOD AUROC" not in page
    assert "<td>–</td>" in page  # round 1 was not evaluated


def test_counts_of_clients_come_back_and_damage_is_named(reported: Path, tmp_path: Path) -> None:
    infos = RunStore(reported).clients()
    assert [info.client for info in infos] == ["client-00", "client-01", "client-02"]
    assert all(sum(info.class_counts) == info.rows == 24 for info in infos)
    for content in ("", "{}", "[]"):
        (tmp_path / "clients.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"clients\.json: cannot be read .*resume the run"):
            RunStore(tmp_path).clients()


def test_no_figure_is_nan(evaluation: Evaluation) -> None:
    assert np.isfinite(evaluation.log_probabilities).all()
    assert all(np.isfinite(value) for value in evaluation.figures.values() if isinstance(value, float))
