"""Methods side by side: what is planned, what is skipped, what is reported."""

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import study_values

from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.partition import partition
from fedppd_ray.errors import CheckpointError, ConfigError, FedPPDError, LockedError, ResourceError
from fedppd_ray.reports.comparison import results, table, write_comparison
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies import comparison as comparisons
from fedppd_ray.studies.base import all_labels, finished, parse_methods
from fedppd_ray.studies.compared import Comparison
from fedppd_ray.studies.comparison import Plan, parse_seeds, plan

Train = Callable[[Config, Path], None]
FILES = [
    "plots/convergence.png",
    "plots/reliability.png",
    "plots/risk_coverage.png",
    "report.html",
    "results.csv",
    "results.json",
    "table.md",
]


def compare(planned: Plan, train: Any) -> Comparison:
    return comparisons.compare(planned, train, partial(write_comparison, planned.out))


def tiny_file(folder: Path) -> Path:
    """The tiny configuration as a file, two rounds long."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(study_values(federation={"rounds": 2})))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_file(tmp_path)


@pytest.fixture
def other(file: Path) -> Callable[..., Path]:
    """Another file with changes by section."""

    def write(**changes: dict[str, Any]) -> Path:
        values = yaml.safe_load(file.read_text())
        for section, keys in changes.items():
            values[section] = {**values.get(section, {}), **keys}
        path = file.with_name("other.yaml")
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def train(train_run: Callable[..., object]) -> Train:
    """Real training without Ray, continued where there is a run."""
    return lambda config, folder: void(train_run(config, folder, resume=RunStore(folder).exists()))


def void(_: object) -> None:
    return None


def never(_: Config, folder: Path) -> None:
    raise AssertionError(f"{folder} is trained again")


@pytest.fixture
def two(file: Path, tmp_path: Path) -> Plan:
    return plan(file, "fedppd,fedppd_distill", str(tmp_path / "out"))


@pytest.fixture(scope="module")
def finished_out(train_run: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `two`, finished; never write into it."""
    folder = tmp_path_factory.mktemp("comparison")
    path = tiny_file(folder)
    compare(plan(path, "fedppd,fedppd_distill", str(folder / "out")), lambda config, run: void(train_run(config, run)))
    return folder / "out"


@pytest.fixture
def done(two: Plan, finished_out: Path) -> Plan:
    """`two`, finished already."""
    shutil.copytree(finished_out, two.out)
    return two


# ---- the plan


def test_every_method_changes_what_its_name_says_and_nothing_else(file: Path, tmp_path: Path) -> None:
    planned = plan(file, ",".join(all_labels()), str(tmp_path), settings=["client.epochs=12"])
    found = {run.label: run.config for run in planned.runs}
    assert {label: config.method for label, config in found.items()} == {
        **{name: name for name in ("fedavg", "fedbe", "fedswag", "fedpa", "fedppd")},
        "fedavg_student": "fedavg",
        "fedppd_distill": "fedppd",
    }
    assert found["fedavg"].baseline.network == "teacher"
    assert found["fedavg_student"].baseline.network == "student"
    assert found["fedppd"].server.aggregate == "average"
    assert found["fedppd_distill"].server.aggregate == "distill"
    assert len({config.teacher.network for config in found.values()}) == 1
    assert all(config.client.epochs == 12 for config in found.values())


def test_every_method_has_the_same_rows_for_a_seed_and_others_for_another(file: Path, tmp_path: Path) -> None:
    planned = plan(file, "fedppd,fedppd_distill", str(tmp_path), seeds="4,5")
    labels = np.asarray(load("mnist5k").train.labels)
    rows = {
        (run.label, run.seed): np.concatenate(
            partition(labels, 10, run.config.data, run.config.federation.clients, run.config.seed).clients
        ).tolist()
        for run in planned.runs
    }
    assert rows["fedppd", 4] == rows["fedppd_distill", 4]
    assert rows["fedppd", 5] == rows["fedppd_distill", 5]
    assert rows["fedppd", 4] != rows["fedppd", 5]


def test_the_first_seed_of_all_methods_comes_first(file: Path, tmp_path: Path) -> None:
    planned = plan(file, "fedppd,fedppd_distill", str(tmp_path), seeds="1,0", rounds=7)
    assert [(run.seed, run.label) for run in planned.runs] == [
        (1, "fedppd"), (1, "fedppd_distill"), (0, "fedppd"), (0, "fedppd_distill"),
    ]  # fmt: skip
    assert planned.runs[3].folder == tmp_path / "fedppd_distill" / "seed-0"
    assert all(run.config.federation.rounds == 7 for run in planned.runs)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fedpdd", ["'fedpdd'", "did you mean 'fedppd'?"]),
        ("fedavg,", ["unknown method ''"]),
        ("fedavg,fedavg", ["'fedavg'", "twice"]),
        ("a=x.yaml,a=y.yaml", ["'a'", "twice"]),
        ("fedavg=x.yaml", ["'fedavg'", "no method has"]),
        ("../a=x.yaml", ["'../a'", "letters"]),
        (".=x.yaml", ["'.'"]),
        ("=x.yaml", ["''"]),
    ],
)
def test_a_method_that_cannot_be_is_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_methods(text, Path("config.yaml"))
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("text", ["", "0,,1", "0,0", "0,00", "-1", "a", "1.5", "²"])
def test_seeds_are_different_whole_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text, 3)


def test_seeds_are_read_in_their_order_and_default_to_the_configs() -> None:
    assert parse_seeds("2, 0,11", 3) == [2, 0, 11]
    assert parse_seeds(None, 3) == [3]


def test_another_file_takes_part_with_its_settings_and_our_seed_and_evaluation(
    file: Path, other: Callable[..., Path], tmp_path: Path
) -> None:
    path = other(teacher={"rate": 0.5}, evaluation={"every": 9, "ood": None})
    planned = plan(file, f"fedppd,mine={path}", str(tmp_path), seeds="8")
    mine = planned.runs[1].config
    assert (planned.runs[1].label, mine.teacher.rate, mine.seed) == ("mine", 0.5, 8)
    assert mine.evaluation == planned.base.evaluation


def test_another_file_with_other_data_is_refused_with_the_keys(
    file: Path, other: Callable[..., Path], tmp_path: Path
) -> None:
    path = other(data={"calibration": 50}, federation={"clients": 4})
    with pytest.raises(ConfigError) as caught:
        plan(file, f"fedppd,mine={path}", str(tmp_path))
    assert all(
        part in str(caught.value) for part in ("mine", "data.calibration: 40 -> 50", "federation.clients: 3 -> 4")
    )


def test_a_method_that_the_configuration_cannot_run_is_named_with_the_key(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fedppd_distill: data\.server_pool"):
        plan(file, "fedppd_distill", str(tmp_path), settings=["data.server_pool=0"])


def test_a_url_is_no_folder_for_a_comparison(file: Path) -> None:
    with pytest.raises(ConfigError, match="local folder"):
        plan(file, "fedppd", "s3://bucket/prefix")


# ---- the runs


def test_a_comparison_leaves_table_results_plots_and_page(done: Plan) -> None:
    comparison = compare(done, never)
    assert [outcome.status for outcome in comparison.outcomes] == ["finished", "finished"]
    found = sorted(str(path.relative_to(done.out)) for path in [*done.out.glob("[!.]*.*"), *done.out.glob("plots/*")])
    assert found == FILES
    assert (done.out / "table.md").read_text(encoding="utf-8") == table(comparison)
    assert json.loads((done.out / "results.json").read_text()) == results(comparison)


def test_the_figures_are_those_of_the_last_round_and_sums_are_over_all(done: Plan) -> None:
    for run in done.runs:
        history = RunStore(run.folder).history()
        outcome = finished(run)
        assert outcome is not None
        assert [line["round"] for line in history] == [1, 2]
        for key in ("accuracy", "nll", "ece", "mce", "brier"):
            assert outcome.value(key) == pytest.approx(history[-1][key], abs=1e-9)
        assert outcome.value("seconds") == pytest.approx(np.median([line["seconds"] for line in history]))
        assert outcome.value("megabytes") == pytest.approx(sum(line["megabytes"] for line in history))
        assert "ood_auroc" in outcome.figures


def test_a_method_is_judged_by_its_own_predictor_not_by_the_exported_network(
    file: Path, tmp_path: Path, train: Train
) -> None:
    """FedSWAG predicts by an average over samples; one network is what it exports."""
    from fedppd_ray.runs.run import evaluate_run

    planned = plan(file, "fedswag", str(tmp_path / "out"), settings=["client.epochs=4", "fedswag.samples=5"])
    outcome = compare(planned, train).outcomes[0]
    last = RunStore(planned.runs[0].folder).history()[-1]
    assert outcome.value("nll") == pytest.approx(last["nll"], abs=1e-9)
    assert outcome.value("nll") != pytest.approx(evaluate_run(planned.runs[0].folder).figures["nll"], abs=1e-9)


def test_fedswag_without_its_last_rounds_snapshots_is_not_reported_as_fedswag(
    file: Path, tmp_path: Path, train: Train
) -> None:
    """Stopped at round 1 of 2, it is FedAvg so far; to ask for one round then must not pass that off as SWAG."""
    longer, shorter = (plan(file, "fedswag", str(tmp_path / "out"), rounds=rounds) for rounds in (2, 1))

    def interrupted(config: Config, folder: Path) -> None:
        save = RunStore.save

        def save_and_stop(*args: Any) -> None:
            save(*args)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunStore, "save", save_and_stop)
            train(config, folder)

    with pytest.raises(KeyboardInterrupt):
        compare(longer, interrupted)
    outcome = compare(shorter, train).outcomes[0]
    assert outcome.status == "failed"
    assert "ask for more rounds" in str(outcome.reason)
    assert compare(longer, train).outcomes[0].status == "finished"


def test_what_is_finished_is_not_done_again(done: Plan) -> None:
    before = (done.out / "results.json").read_bytes()
    assert all(outcome.status == "finished" for outcome in compare(done, never).outcomes)
    assert (done.out / "results.json").read_bytes() == before


def test_lost_figures_are_made_again_from_the_checkpoint(done: Plan, train: Train) -> None:
    before = (done.out / "results.json").read_bytes()
    (done.runs[0].folder / "figures.json").write_text('{"format": 1')
    resumed: list[Path] = []

    def again(config: Config, folder: Path) -> None:
        resumed.append(folder)
        train(config, folder)

    compare(done, again)
    assert resumed == [done.runs[0].folder]
    assert (done.out / "results.json").read_bytes() == before


def test_more_rounds_continue_the_runs_and_renew_the_figures(file: Path, tmp_path: Path, train: Train) -> None:
    out = str(tmp_path / "out")
    short = compare(plan(file, "fedppd", out, rounds=1), train).outcomes[0]
    long = compare(plan(file, "fedppd", out, rounds=2), train).outcomes[0]
    assert long.history[0] == short.history[0]
    assert len(long.history) == 2
    assert long.figures["nll"] != short.figures["nll"]
    with pytest.raises(CheckpointError, match=r"federation\.rounds.*at round 2 already"):
        compare(plan(file, "fedppd", out, rounds=1), never)


def test_results_are_renewed_after_every_run(two: Plan, train: Train) -> None:
    seen = []

    def watched(config: Config, folder: Path) -> None:
        methods = json.loads((two.out / "results.json").read_text())["methods"]
        seen.append([methods[label]["runs"][0]["status"] for label in two.labels])
        assert (two.out / "report.html").exists()
        train(config, folder)

    compare(two, watched)
    assert seen == [["waiting", "waiting"], ["finished", "waiting"]]


def test_a_diverged_method_is_reported_and_the_others_go_on(
    file: Path, other: Callable[..., Path], tmp_path: Path, train: Train
) -> None:
    path = other(teacher={"rate": 1e30})
    planned = plan(file, f"wild={path},fedppd", str(tmp_path / "out"))
    done = compare(planned, train)
    assert [outcome.status for outcome in done.outcomes] == ["failed", "finished"]
    text = (planned.out / "table.md").read_text(encoding="utf-8")
    assert re.search(r"^\| wild \(failed\) \| – \|", text, re.MULTILINE)
    assert re.search(r"^- wild, seed 3: failed after 0 rounds: .{10,}", text, re.MULTILINE)
    tried: list[str] = []

    def again(_: Config, folder: Path) -> None:
        tried.append(folder.parent.name)
        raise FedPPDError("still wild")

    assert compare(planned, again).outcomes[0].reason == "still wild"
    assert tried == ["wild"]


def test_a_defect_in_one_method_costs_only_that_method(two: Plan, train: Train) -> None:
    def broken(config: Config, folder: Path) -> None:
        if config.server.aggregate == "average":
            raise RuntimeError("a defect\nof two lines")
        train(config, folder)

    done = compare(two, broken)
    assert [outcome.status for outcome in done.outcomes] == ["failed", "finished"]
    assert done.outcomes[0].reason == "RuntimeError: a defect of two lines"


def test_ctrl_c_is_no_failed_run(two: Plan) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(two, stopped)
    statuses = [
        run["runs"][0]["status"] for run in json.loads((two.out / "results.json").read_text())["methods"].values()
    ]
    assert statuses == ["waiting", "waiting"]


def test_ctrl_c_leaves_a_table_that_knows_the_rounds_done(two: Plan, train: Train) -> None:
    def one_round(config: Config, folder: Path) -> None:
        shorter = config.federation.model_copy(update={"rounds": 1})
        train(config.model_copy(update={"federation": shorter}), folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(two, one_round)
    assert "fedppd, seed 3: not finished, 1 of 2 rounds done" in (two.out / "table.md").read_text(encoding="utf-8")


def test_a_cluster_that_cannot_be_had_is_not_asked_again_for_every_method(two: Plan) -> None:
    asked: list[str] = []

    def no_cluster(_: Config, folder: Path) -> None:
        asked.append(folder.parent.name)
        raise ResourceError("no Ray cluster")

    with pytest.raises(ResourceError):
        compare(two, no_cluster)
    assert asked == ["fedppd"]


def test_a_run_that_failed_before_its_first_round_may_have_other_settings(
    file: Path, tmp_path: Path, train: Train
) -> None:
    out = str(tmp_path / "out")
    wild = plan(file, "fedppd", out, settings=["teacher.rate=1e30"])
    assert compare(wild, train).outcomes[0].status == "failed"
    assert compare(plan(file, "fedppd", out), train).outcomes[0].status == "finished"


def test_a_folder_that_holds_a_run_is_no_folder_for_a_comparison(two: Plan, train: Train) -> None:
    train(two.runs[0].config, two.out)
    with pytest.raises(ConfigError, match="holds a run of its own"):
        compare(two, never)


def test_finished_runs_that_were_not_asked_for_are_named(file: Path, done: Plan) -> None:
    compare(plan(file, "fedppd", str(done.out)), never)
    text = (done.out / "table.md").read_text(encoding="utf-8")
    assert "Finished in this folder too, not asked for: fedppd_distill, seed 3." in text


def test_a_folder_of_another_comparison_is_refused_before_anything_runs(file: Path, done: Plan) -> None:
    changed = plan(file, "fedppd_distill,fedppd", str(done.out), settings=["teacher.rate=0.2"])
    before = (done.out / "results.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"another config \(teacher\.rate: 0\.045 -> 0\.2\)"):
        compare(changed, never)
    assert (done.out / "results.json").read_bytes() == before


def test_a_second_comparison_in_the_same_folder_is_refused(two: Plan) -> None:
    two.out.mkdir()
    with (two.out / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="another command is at work"):
            compare(two, never)
