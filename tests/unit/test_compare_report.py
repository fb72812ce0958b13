"""A comparison's figures, by hand: means over seeds, curves, cells, and where the paper may be quoted."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config import Config
from fedppd_ray.config_file import load_config
from fedppd_ray.evaluation.compare_report import cells, notes, write_comparison
from fedppd_ray.evaluation.compared import COVERAGES, Comparison, Outcome, curves_of, pooled_bins
from fedppd_ray.evaluation.paper import paper_figures, regime_of
from fedppd_ray.evaluation.run import Evaluation

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
    part = {"kind": "iid", "rows_per_client": 4000}
    labels = {outcome.label: [] for outcome in outcomes}
    return Comparison("two", {"name": "cifar10", "partition": part}, 10, outcomes, labels, **changes)


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
    assert row["seconds"] == "4.0 ± 0.0"
    assert row["OOD AUROC"] == "–"


def test_one_seed_has_no_deviation() -> None:
    assert dict(zip(*cells(made(outcome("m", 0, 60.0))), strict=True))["accuracy %"] == "60.00"


def test_the_papers_figure_stands_beside_ours_and_its_rounds_below() -> None:
    done = made(outcome("fedavg", 0, 70.0), paper={"fedavg": {"accuracy": 73.8}}, paper_rounds=200)
    assert dict(zip(*cells(done), strict=True))["accuracy %"] == "70.00 (73.80)"
    assert any("from 200 rounds. Its runs are longer than ours (2 rounds)" in note for note in notes(done))
    assert not any("paper" in note for note in notes(made(outcome("m", 0, 70.0))))


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
    assert paper_figures(regime_of(cifar(tiny, kind), rows), "fedppd", None).get("accuracy") == accuracy


def test_the_paper_is_not_quoted_for_other_clients_or_classes(tiny: Callable[..., Config]) -> None:
    assert regime_of(cifar(tiny), 2100) is not None
    assert regime_of(cifar(tiny, federation={"clients": 20}), 2100) is None
    assert regime_of(cifar(tiny, federation={"clients": 10, "participation": 0.5}), 2100) is None
    skewed = {"kind": "major_classes", "rows_per_client": 2100, "major": 3}
    assert regime_of(cifar(tiny, data={"name": "cifar10", "partition": skewed}), 2100) is None
    assert regime_of(tiny(federation={"clients": 10}), 2100) is None


def test_the_papers_ood_figure_needs_the_papers_ood_set(tiny: Callable[..., Config]) -> None:
    regime = regime_of(cifar(tiny), 2100)
    assert paper_figures(regime, "fedppd_distill", "svhn")["ood_auroc"] == 0.765
    assert "ood_auroc" not in paper_figures(regime, "fedppd_distill", "glyphs")


def test_methods_that_the_paper_does_not_have_are_not_quoted(tiny: Callable[..., Config]) -> None:
    regime = regime_of(cifar(tiny), 2100)
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
    config = load_config(Path(__file__).parents[2] / "configs" / f"{preset}.yaml")
    regime = regime_of(config, rows)
    assert regime is not None
    assert regime.rounds == config.federation.rounds
    assert regime.ood in (None, config.evaluation.ood)


def test_a_preset_of_fewer_rows_is_not() -> None:
    small = load_config(Path(__file__).parents[2] / "configs" / "cifar10_small.yaml")
    assert regime_of(small, small.data.partition.rows_per_client) is None
