"""What calibration rows choose: the score, and the round to stop at. Test rows and foreign sets choose nothing."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fedppd_ray.cli.app import app
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config, EvaluationConfig
from fedppd_ray.data import datasets
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.evaluation.calibration import calibrate
from fedppd_ray.inference import held_out
from fedppd_ray.inference.abstention import score_of
from fedppd_ray.inference.scores import Outputs
from fedppd_ray.methods import build_method
from fedppd_ray.reports.comparison import table, write_comparison
from fedppd_ray.reports.run import figure_rows
from fedppd_ray.runs.export import read_card
from fedppd_ray.runs.run import Run
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies import comparison as comparisons
from fedppd_ray.studies.base import StudyRun, finished, keep_figures
from fedppd_ray.studies.compared import Comparison

Tiny = Callable[..., Config]
Train = Callable[..., Any]


# ---- the score


def outputs(logits: np.ndarray, features: np.ndarray) -> Outputs:
    return Outputs(logits - np.log(np.exp(logits).sum(1, keepdims=True)), logits, features.astype(np.float32))


@pytest.mark.parametrize("telling", ["feature_norm", "energy"])
def test_auto_takes_the_score_that_tells_most_on_calibration_rows_and_outliers(telling: str) -> None:
    """The same probabilities everywhere: only the size of logits, or of features, tells outliers and wrong answers."""
    generator = np.random.default_rng(0)
    labels = np.array([0] * 30 + [1] * 10)  # the last ten are wrong
    base = np.tile([1.0, 0.0], (40, 1))
    strong, weak = np.r_[np.full(30, 5.0), np.full(10, 2.0)], np.full(40, 1.0)
    random = generator.uniform(1, 5, (2, 40))
    size = {"energy": (strong, weak), "feature_norm": tuple(random)}
    norm = {"energy": tuple(random), "feature_norm": (strong, weak)}
    known, foreign = (
        outputs(base + size[telling][at][:, None], norm[telling][at][:, None] * np.ones((40, 3))) for at in range(2)
    )
    chosen = calibrate(EvaluationConfig(score="auto"), known, labels, lambda: foreign)
    if telling == "energy":  # with equal probabilities the largest logit tells the same: the first of equals
        assert chosen.choice["energy"] == chosen.choice["max_logit"]
    assert chosen.score.name == telling
    assert chosen.choice[telling] == {"outlier_auroc": 1.0, "misclassification_auroc": 1.0, "mean": 1.0}
    assert set(chosen.choice) == {"entropy", "max_probability", "energy", "max_logit", "feature_norm"}
    assert chosen.abstention is not None
    assert chosen.abstention["score"] == telling


def test_auto_of_an_ensemble_chooses_among_scores_of_probabilities_and_of_equals_the_entropy() -> None:
    only = Outputs(np.log(np.tile([0.7, 0.3], (6, 1))))
    chosen = calibrate(EvaluationConfig(score="auto"), only, np.array([0, 0, 0, 0, 0, 1]), lambda: only)
    assert list(chosen.choice) == ["entropy", "max_probability"]
    assert chosen.score.name == "entropy"


def test_a_named_score_asks_no_outliers_and_one_that_an_ensemble_lacks_has_no_threshold() -> None:
    def never() -> Outputs:
        raise AssertionError("outliers were made")

    only = Outputs(np.log(np.tile([0.7, 0.3], (6, 1))))
    labels = np.array([0, 0, 0, 0, 0, 1])
    assert calibrate(EvaluationConfig(), only, labels, never).score.name == "entropy"
    assert calibrate(EvaluationConfig(score="energy"), only, labels, never).abstention is None


def test_a_run_chooses_its_score_without_looking_at_a_foreign_set(
    tiny: Tiny, train_run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a foreign set was opened")

    config = tiny(method="fedavg", federation={"rounds": 1}, evaluation={"score": "auto", "ood": "noise"})
    with monkeypatch.context() as patch:
        patch.setattr(held_out, "load_ood", forbidden)
        train_run(config, tmp_path / "run")
    assert held_out.load_ood is datasets.load_ood
    card = read_card(tmp_path / "run")
    best = max(card["score_choice"].values(), key=lambda found: found["mean"])
    assert card["score_choice"][score_of(card)] == best
    figures = Run(tmp_path / "run").evaluate()
    assert figures["score"] == card["score"] == figures["abstention"]["score"]
    assert figures["ood_auroc"] == figures["scores"][card["score"]]["ood_auroc"]


@pytest.mark.parametrize(("key", "value"), [("score", "auto"), ("export", "best")])
def test_what_is_chosen_on_calibration_rows_needs_some(key: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"evaluation\.{key}: {value} is chosen on calibration rows; set data\.calib"
    ):
        parse_config({"evaluation": {key: value}})


# ---- the round


def with_best(tiny: Tiny, **changes: Any) -> Config:
    """Momentum that throws the model back in its last round: the best is another."""
    return tiny(
        method="fedavg",
        federation={"rounds": 6},
        data={"server_pool": 0, "partition": {"rows_per_client": 40}},
        client={"epochs": 6},
        baseline={"rate": 0.03, "momentum": 0.9},
        checkpoint={"keep": 1},
        evaluation={"export": "best", "ood": "noise", **changes},
    )


@pytest.fixture(scope="module")
def stopped(tiny: Tiny, train_run: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train_run(with_best(tiny), folder)
    return folder


def test_the_student_and_a_checkpoint_of_the_best_round_stay(stopped: Path) -> None:
    store = RunStore(stopped)
    losses = [line["calibration_nll"] for line in store.history()]
    best = 1 + int(np.argmin(losses))
    assert best < 6, f"the last round is the best: {losses}"
    assert read_card(stopped)["round"] == store.best_round() == store.best().round == best
    kept = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    assert kept == [f"round-{number:06d}" for number in (best, 6)]
    student = build_method(store.config()).student(store.best().models).export()
    assert np.array_equal(Run(stopped).student()._predict._module.state_dict()["out.bias"].numpy(), student[-10:])


def test_a_resumed_run_stops_at_the_same_round(tiny: Tiny, train_run: Train, tmp_path: Path, stopped: Path) -> None:
    config = with_best(tiny)
    best = RunStore(stopped).best_round() or 0
    first = config.federation.model_copy(update={"rounds": best + 1})
    train_run(config.model_copy(update={"federation": first}), tmp_path / "run")
    train_run(config, tmp_path / "run", resume=True)
    assert read_card(tmp_path / "run") == read_card(stopped)
    assert RunStore(tmp_path / "run").best_round() == best


def test_the_last_round_is_exported_unless_the_best_is_asked_for(finished_run: Path) -> None:
    assert read_card(finished_run)["round"] == 2
    assert len(list((finished_run / "checkpoints").iterdir())) == 2


# ---- in a comparison


@pytest.fixture(scope="module")
def compared(train_run: Train, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """FedAvg and FedSWAG, which predicts by several networks, with a row of FedAvg's best round."""
    folder = tmp_path_factory.mktemp("early")
    values = with_best(tiny, export="last", ood=["noise", "glyphs"]).values()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    planned = comparisons.plan(
        folder / "tiny.yaml", "fedavg,fedswag", str(folder / "out"), early_stop=True,
        settings=["fedswag.samples=2"],
    )  # fmt: skip
    assert [run.label for run in planned.runs] == ["fedavg", "fedavg+early", "fedswag"]

    def train(config: Config, run: Path) -> None:
        assert not (run / "figures.json").exists(), "trained again"
        train_run(config, run)

    return folder, comparisons.compare(planned, train, partial(write_comparison, planned.out))


def test_an_early_stopped_row_is_the_same_run_at_its_best_round(compared: tuple[Path, Comparison]) -> None:
    folder, done = compared
    last, early, swag = done.outcomes
    assert [outcome.status for outcome in done.outcomes] == ["finished"] * 3, [o.reason for o in done.outcomes]
    store = RunStore(folder / "out" / "fedavg" / "seed-3")
    best = store.best_round()
    assert early.figures["round"] == best
    assert early.value("nll") == store.history()[best - 1]["nll"]
    assert last.value("nll") == store.history()[-1]["nll"]
    assert [line["round"] for line in early.history] == list(range(1, best + 1))
    assert early.value("scaled.nll") is not None
    assert early.value("temperature") != 1
    assert swag.figures["scores"]["energy"] is None
    assert swag.figures["scores"]["entropy"] is not None


def test_the_tables_and_the_page_show_what_is_new(compared: tuple[Path, Comparison]) -> None:
    folder, done = compared
    text = table(done)
    assert "## Scaled by temperature, selective, per client" in text
    assert "| fedavg, energy |" in text
    assert "| fedswag, energy |" not in text
    assert "fedswag (energy, max_logit, feature_norm)" in text
    assert f"fedavg+early seed 3: {done.outcomes[1].figures['round']}" in text
    shown = done.outcomes[1].figures
    assert f"| {shown['scaled']['nll']:.3f} | {shown['scaled']['ece']:.2f} |" in text
    row = shown["scores"]["entropy"]
    parts = [row["misclassification_auroc"], *(row["ood"][name]["auroc"] for name in ("noise", "glyphs"))]
    assert "| fedavg+early, entropy | " + " | ".join(f"{part:.3f}" for part in [*parts, row["ood_auroc"]]) in text
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "AUROC by score" in page
    assert "noise, glyphs" in page
    results = json.loads((folder / "out" / "results.json").read_text())
    means = results["methods"]["fedavg"]["means"]
    assert means["per_client.accuracy.worst"]["mean"] <= means["per_client.accuracy.p10"]["mean"]
    assert "teacher_accuracy" not in means


def test_finished_figures_are_those_of_the_asked_sets(compared: tuple[Path, Comparison]) -> None:
    folder, _ = compared
    out = folder / "out" / "fedavg" / "seed-3"
    run = StudyRun("fedavg", 3, RunStore(out).config(), out)
    assert finished(run) is not None
    for change in ({"ood": "noise"}, {"ood": ("glyphs", "noise")}, {"corruptions": True}):
        other = run.config.model_copy(update={"evaluation": run.config.evaluation.model_copy(update=change)})
        assert finished(StudyRun("fedavg", 3, other, out)) is None


def test_a_run_whose_best_round_was_not_kept_says_how_to_keep_it(finished_run: Path) -> None:
    (config, round_id) = (RunStore(finished_run).config(), RunStore(finished_run).best_round())
    assert round_id is not None
    run = StudyRun("x", 3, config, finished_run.with_name("nothing"), best=True)
    with pytest.raises(CheckpointError, match=r"best round was not kept; .*evaluation\.export=best"):
        keep_figures(run)


# ---- evaluate


def test_evaluate_shows_scores_and_on_demand_corruptions(stopped: Path) -> None:
    plain = CliRunner().invoke(app, ["evaluate", str(stopped), "--json"])
    figures = json.loads(plain.output)
    assert "corruptions" not in figures
    assert set(figures["scores"]) >= {"entropy", "max_probability", "energy", "max_logit", "feature_norm"}
    worse = Run(stopped).evaluate(corruptions=True)
    found = worse["corruptions"]
    assert [line["severity"] for line in found["gaussian_noise"]] == [1, 2, 3, 4, 5]
    assert found["mean"]["accuracy"] == pytest.approx(
        np.mean([line["accuracy"] for name, lines in found.items() if name != "mean" for line in lines])
    )
    assert found["gaussian_noise"][0]["accuracy"] != worse["accuracy"]
    names = dict(figure_rows(worse))
    assert names["temperature"] == f"{worse['temperature']:.3f}"
    assert "contrast, accuracy at severity 1 to 5" in names
    assert "AUROC by feature norm" in names
