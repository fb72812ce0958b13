"""A comparison's figures, by hand: means over seeds, curves, cells, and where the paper may be quoted."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.file import load_config, load_for_method
from fedppd_ray.config.identity import flatten
from fedppd_ray.config.schema import Config
from fedppd_ray.evaluation.run import Evaluation
from fedppd_ray.methods import compare_rows
from fedppd_ray.reports.comparison import cells, notes, write_comparison
from fedppd_ray.studies.compared import COVERAGES, Comparison, Outcome, curves_of, pooled_bins
from fedppd_ray.studies.paper import experiment_of, other_settings, paper_figures

CONFIGS = Path(__file__).parents[2] / "configs"

# ---- figures, by hand


def evaluation(confidences: list[float], right: list[bool]) -> Evaluation:
    """Two classes; the answer is class 0, and the label is 0 where it is right."""
    p = np.array([[value, 1 - value] for value in confidences])
    return Evaluation({}, np.log(p), np.array([0 if ok else 1 for ok in right]), np.empty((0, 2)))


def test_risk_is_the_share_of_wrong_answers_among_the_surest() -> None:
    risks = curves_of(evaluation([0.6, 0.99, 0.8, 0.9], [False, True, False, True]))["risk"]
    by_coverage = dict(zip(COVERAGES, risks, strict=True))
    assert [by_coverage[share] for share in (0.01, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([0, 0, 0, 100 / 3, 50])
    assert by_coverage[0.51] == pytest.approx(100 / 3)  # a coverage is reached, not missed


def test_bins_are_pooled_over_seeds_by_rows() -> None:
    first = curves_of(evaluation([0.99, 0.99, 0.99], [True, True, False]))
    second = curves_of(evaluation([0.95, 0.61], [False, True]))
    runs = [Outcome("m", seed, 1, "finished", curves=curves) for seed, curves in enumerate((first, second))]
    count, confidence, accuracy = pooled_bins(runs)
    assert (count[14], count[9], sum(count)) == (4, 1, 5)
    assert confidence[14] == pytest.approx((3 * 0.99 + 0.95) / 4)
    assert accuracy[14] == pytest.approx(0.5)
    assert np.isnan(accuracy[0])


def outcome(label: str, seed: int, accuracy: float | None, **changes: Any) -> Outcome:
    curves = curves_of(evaluation([0.9, 0.7], [True, False]))
    lines = [{"round": 1, "accuracy": accuracy, "ece": 1.0, "seconds": 2.0, "megabytes": 0.5}] * 2
    done = Outcome(label, seed, 2, "finished", figures={"accuracy": accuracy, "ece": 4.0}, curves=curves, history=lines)
    return replace(done, **changes)


def made(*outcomes: Outcome, **changes: Any) -> Comparison:
    settings = {
        "data": {"name": "cifar10", "partition": {"kind": "iid", "rows_per_client": 4000}},
        "federation": {"clients": 10},
        "evaluation": {"ood": "svhn"},
    }
    labels = {outcome.label: [] for outcome in outcomes}
    return Comparison("two", settings, outcomes, labels, **changes)


def test_a_cell_is_mean_and_deviation_over_the_finished_seeds() -> None:
    runs = [
        outcome("m", 0, 60.0),
        outcome("m", 1, 62.0),
        outcome("m", 2, None, status="failed", reason="x", figures={}),
    ]
    done = made(*runs)
    mean = done.means("m")["accuracy"]
    assert (mean.mean, mean.seeds) == (61.0, 2)
    assert mean.deviation == pytest.approx(2**0.5)
    row = dict(zip(*cells(done), strict=True))
    assert row["method"] == "m (2 of 3 seeds, others failed)"
    assert row["accuracy %"] == "61.00 ± 1.41"
    assert row["seconds per round"] == "2.0 ± 0.0"
    assert row["OOD AUROC"] == "–"


def test_one_seed_has_no_deviation() -> None:
    assert dict(zip(*cells(made(outcome("m", 0, 60.0))), strict=True))["accuracy %"] == "60.00"


def test_the_papers_figure_stands_beside_ours_and_its_rounds_below() -> None:
    done = made(outcome("fedavg", 0, 70.0), paper={"fedavg": {"accuracy": 73.8}}, paper_rounds=200)
    assert dict(zip(*cells(done), strict=True))["accuracy %"] == "70.00 (73.80)"
    assert any("from 200 rounds. Its runs are longer than ours (2 rounds)" in note for note in notes(done))
    assert not any("paper" in note for note in notes(made(outcome("m", 0, 70.0))))


def test_the_papers_figure_has_the_papers_decimals() -> None:
    figures = {"accuracy": 70.0, "ece": 4.0, "brier": 0.4567}
    done = made(outcome("fedavg", 0, 70.0, figures=figures), paper={"fedavg": {"brier": 0.6}}, paper_rounds=200)
    assert dict(zip(*cells(done), strict=True))["Brier"] == "0.457 (0.60)"


def test_seconds_are_the_median_round_so_that_a_pause_does_not_count() -> None:
    lines = [{"seconds": value, "megabytes": 1.0} for value in (3.0, 300.0, 2.0)]
    assert Outcome("m", 0, 3, "waiting", history=lines).value("seconds") == 3.0
    assert Outcome("m", 0, 3, "waiting").value("seconds") is None


def test_notes_say_who_held_what_and_against_what_it_was_judged() -> None:
    text = " ".join(notes(made(outcome("m", 0, 70.0), rows=3987.6)))
    assert "iid partition, 10 clients with 3988 rows on average, 2 rounds; seed 0" in text
    assert "OOD AUROC: svhn" in text


def test_notes_name_finished_runs_that_were_not_asked_for() -> None:
    text = " ".join(notes(made(outcome("m", 0, 70.0), also_there=["fedbe, seed 1"])))
    assert "not asked for: fedbe, seed 1" in text


def test_methods_that_differ_from_the_authors_alike_share_a_line() -> None:
    how = {"a": ["client.epochs: 10 -> 1"], "b": ["client.epochs: 10 -> 1"], "c": [], "d": ["seed: 1 -> 2"]}
    runs = [outcome(label, 0, 70.0) for label in how]
    quoted = {label: {"accuracy": 1.0} for label in "abc"}
    found = [note for note in notes(made(*runs, paper=quoted, paper_rounds=2, not_as_paper=how)) if "authors" in note]
    assert found == ["Not as the authors ran it (theirs -> ours), a, b: client.epochs: 10 -> 1"]


def test_the_page_needs_nothing_but_itself_and_escapes_what_comes_from_outside(tmp_path: Path) -> None:
    failed = outcome("n", 0, None, status="failed", reason="<script>alert(1)</script>", figures={})
    write_comparison(tmp_path, made(outcome("m", 0, 60.0), failed))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)\s*=\s*"?([^">\s]+)', page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page
    assert "failed after 2 rounds: &lt;script&gt;" in page


def test_a_comparison_without_any_finished_run_can_be_written(tmp_path: Path) -> None:
    write_comparison(tmp_path, made(Outcome("m", 0, 5, "waiting")))
    assert "m, seed 0: not finished, 0 of 5 rounds done" in (tmp_path / "table.md").read_text(encoding="utf-8")


# ---- the paper


def cifar(tiny: Callable[..., Config], kind: str = "major_classes", **changes: Any) -> Config:
    data = {"name": "cifar10", "partition": {"kind": kind, "rows_per_client": 2100}}
    return tiny(**{"data": data, "federation": {"clients": 10}, "evaluation": {"ood": None}, **changes})


@pytest.mark.parametrize(
    ("rows", "kind", "accuracy"),
    [
        (2100, "major_classes", 61.86),
        (1700, "major_classes", 61.86),
        (2500, "major_classes", 61.86),
        (1600, "major_classes", None),
        (2600, "major_classes", None),
        (None, "major_classes", None),
        (4000, "iid", 74.91),
        (2100, "iid", None),
        (2100, "dirichlet", None),
    ],
)
def test_the_paper_is_quoted_for_its_partition_and_rows_within_a_fifth(
    tiny: Callable[..., Config], rows: int | None, kind: str, accuracy: float | None
) -> None:
    assert paper_figures(experiment_of(cifar(tiny, kind), rows), "fedppd", None).get("accuracy") == accuracy


def test_the_paper_is_not_quoted_for_other_clients_or_classes(tiny: Callable[..., Config]) -> None:
    assert experiment_of(cifar(tiny), 2100) is not None
    assert experiment_of(cifar(tiny, federation={"clients": 20}), 2100) is None
    assert experiment_of(cifar(tiny, federation={"clients": 10, "participation": 0.5}), 2100) is None
    skewed = {"kind": "major_classes", "rows_per_client": 2100, "major": 3}
    assert experiment_of(cifar(tiny, data={"name": "cifar10", "partition": skewed}), 2100) is None
    assert experiment_of(tiny(federation={"clients": 10}), 2100) is None


def test_the_paper_is_not_quoted_where_a_client_brings_rows_of_its_own(tiny: Callable[..., Config]) -> None:
    assert experiment_of(cifar(tiny, clients={"client-00": {"cpus": 1}}), 2100) is not None
    assert experiment_of(cifar(tiny, clients={"client-00": {"data": "/data"}}), 2100) is None


@pytest.mark.parametrize("label", ["fedavg", "fedbe", "fedswag", "fedpa", "fedppd", "fedppd_distill"])
@pytest.mark.parametrize("preset", ["mnist", "cifar10", "cifar10_iid", "cifar100", "cifar100_iid", "femnist"])
def test_a_preset_differs_from_the_authors_only_where_it_says_so(preset: str, label: str) -> None:
    config = load_for_method(CONFIGS / f"{preset}.yaml", (), compare_rows()[label].changes)
    regime = experiment_of(config, config.data.partition.rows_per_client)
    expected = []
    if preset.startswith("cifar100") and regime and regime.name in compare_rows()[label].paper:
        roles = ("teacher", "student") if label.startswith("fedppd") else ("teacher",)
        expected = [f"{role}.pretrained: True -> False" for role in roles]
    if (preset, label) == ("femnist", "fedppd_distill"):
        expected = ["teacher.rate: 0.06 -> 0.05", "teacher.rate_gamma: 0.85 -> 0.8"]
    assert other_settings(regime, label, config) == expected


# Settings that are not held against the authors': what is data or belongs to the machine, what they did not publish
# (the baselines' own), and what only other samplers read.
NOT_COMPARED = (
    *(
        "name",
        "seed",
        "method",
        "data.",
        "federation.",
        "evaluation.",
        "resources.",
        "clients",
        "checkpoint.",
        "active",
    ),
    *("baseline.", "fedswag.", "fedpa.", "server.aggregate"),
    *("teacher.sampling_epochs", "teacher.friction", "teacher.preconditioner"),
    # What only counts where something that is compared is switched on.
    *("client.rate_end", "client.outliers.start", "client.outliers.share", "teacher.network_", "student.network_"),
    *("student.label_weight_end",),
)


@pytest.mark.parametrize("label", ["fedavg", "fedbe", "fedswag", "fedpa", "fedppd", "fedppd_distill"])
def test_every_setting_that_matters_is_compared(label: str) -> None:
    row = compare_rows()[label]
    config = load_for_method(CONFIGS / "cifar10.yaml", (), row.changes)
    left = {key for key in flatten(config) if key not in row.authors["cifar10"] and not key.startswith(NOT_COMPARED)}
    assert left == set()


@pytest.mark.parametrize(
    ("label", "setting", "noted"),
    [
        ("fedppd_distill", "server.distill.momentum=0.5", True),
        ("fedppd_distill", "server.distill.swa_start=100", True),
        ("fedbe", "server.distill.spread=0.5", True),
        ("fedbe", "server.distill.scale=2.0", True),
        ("fedavg", "client.epochs=1", True),
        ("fedavg", "data.partition.extra_per_class=200", True),
        ("fedavg", "teacher.network=cifar10_student", True),
        ("fedavg", "student.rate=0.05", False),  # it has no student
        ("fedppd", "student.rate=0.05", True),
        ("fedppd", "server.distill.epochs=1", False),  # its server does not distil
        ("fedbe", "server.distill.epochs=1", True),
        ("fedbe", "data.server_pool=100", True),
        ("fedppd", "federation.rounds=20", False),  # said in the table's own words
    ],
)
def test_another_setting_than_the_authors_is_named_where_it_matters(label: str, setting: str, noted: bool) -> None:
    config = load_for_method(CONFIGS / "cifar10.yaml", [setting], compare_rows()[label].changes)
    found = other_settings(experiment_of(config, 2100), label, config)
    assert [line.split(":")[0] for line in found] == ([setting.split("=")[0]] if noted else [])


def test_the_papers_ood_figure_needs_the_papers_ood_set(tiny: Callable[..., Config]) -> None:
    regime = experiment_of(cifar(tiny), 2100)
    assert paper_figures(regime, "fedppd_distill", "svhn")["ood_auroc"] == 0.765
    assert "ood_auroc" not in paper_figures(regime, "fedppd_distill", "glyphs")


def test_methods_that_the_paper_does_not_have_are_not_quoted(tiny: Callable[..., Config]) -> None:
    regime = experiment_of(cifar(tiny), 2100)
    assert paper_figures(regime, "fedavg_student", "svhn") == {}
    assert "ece" not in paper_figures(regime, "fedpa", "svhn")


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("mnist", 500),
        ("cifar10", 2100),
        ("cifar10_iid", 4000),
        ("cifar100", 2200),
        ("cifar100_iid", 4000),
        ("femnist", 2000),
    ],
)
def test_the_papers_presets_are_its_experiments(preset: str, rows: int) -> None:
    config = load_config(CONFIGS / f"{preset}.yaml")
    regime = experiment_of(config, rows)
    assert regime is not None
    assert regime.rounds == config.federation.rounds
    assert regime.ood in (None, config.evaluation.ood)


def test_a_preset_of_fewer_rows_is_not() -> None:
    small = load_config(CONFIGS / "cifar10_small.yaml")
    assert experiment_of(small, small.data.partition.rows_per_client) is None
