"""Active learning: what is planned, what is trained once, what happens when a series fails."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import study_values

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError, ConfigError, FedPPDError, ResourceError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.reports.active import cells, notes, write_study
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies import active
from fedppd_ray.studies.active import Plan, Study, Train, plan

AMOUNTS = {"labelled": 8, "pool": 16, "budget": 8}  # three trainings


def study(planned: Plan, train: Train) -> Study:
    return active.study(planned, train, partial(write_study, planned.out))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    values = study_values(federation={"rounds": 1})
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**values, "active": AMOUNTS}))
    return path


@pytest.fixture
def other(file: Path) -> Callable[..., Path]:
    """Another file with changes by section."""

    def write(**changes: Any) -> Path:
        values = yaml.safe_load(file.read_text())
        for section, keys in changes.items():
            values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
        path = file.with_name("other.yaml")
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def one(file: Path, tmp_path: Path) -> Plan:
    return plan(file, "fedppd", str(tmp_path / "out"))


@pytest.fixture
def train(train_run: Callable[..., object]) -> Train:
    """Real training without Ray, continued where there is a run."""

    def run(config: Config, folder: Path, acquisition_states: Sequence[GlobalState]) -> None:
        train_run(config, folder, resume=RunStore(folder).exists(), acquisition_states=acquisition_states)

    return run


def never(_: Config, folder: Path, __: Sequence[GlobalState]) -> None:
    raise AssertionError(f"{folder} is trained again")


def written(planned: Plan) -> Any:
    return json.loads((planned.out / "results.json").read_text())


def test_the_first_training_and_that_of_an_emptied_pool_are_made_once(one: Plan, train: Train) -> None:
    trained: list[str] = []

    def watched(config: Config, folder: Path, acquisition_states: Sequence[GlobalState]) -> None:
        trained.append(f"{folder.relative_to(one.out)} after {len(acquisition_states)}")
        train(config, folder, acquisition_states)

    done = study(one, watched)
    assert trained == [
        "fedppd/step-0 after 0",
        "fedppd/entropy/step-1 after 1",
        "fedppd/random/step-1 after 1",
        "fedppd/entropy/step-2 after 2",
    ]
    assert [(p.acquisition, p.step, p.labels) for p in done.points] == [
        (acquisition, step, 8 + 8 * step) for step in range(3) for acquisition in ("entropy", "random")
    ]
    figures = {(p.acquisition, p.step): p.figures["nll"] for p in done.points}
    assert figures["entropy", 0] == figures["random", 0]
    assert figures["entropy", 1] != figures["random", 1]
    assert figures["entropy", 2] == figures["random", 2]
    assert written(one)["points"] == [vars(point) for point in done.points]


def test_what_chance_labels_last_is_what_entropy_labels_last(one: Plan, tmp_path: Path, train: Train) -> None:
    """The claim that saves a training: both series end with the same rows, so with the same bits."""
    study(one, train)
    models = [RunStore(one.run("fedppd", "random", step).folder).latest() for step in (0, 1)]
    train(one.configs["fedppd"]["random"], tmp_path / "apart", models)
    apart = RunStore(tmp_path / "apart").latest().models
    shared = RunStore(one.run("fedppd", "entropy", 2).folder).latest().models
    assert all((apart[role] == shared[role]).all() for role in shared)


def test_a_study_begun_again_shows_all_that_is_finished_from_the_start(one: Plan, train: Train) -> None:
    study(one, train)
    before = written(one)
    seen: list[int] = []

    def stopped(*_: object) -> None:
        seen.append(len(written(one)["points"]))
        raise KeyboardInterrupt

    (one.run("fedppd", "random", 1).folder / "figures.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        study(one, stopped)
    assert seen == [5]
    study(one, train)
    assert written(one) == before
    study(one, never)


def test_a_series_that_fails_ends_and_the_others_go_on(one: Plan, train: Train) -> None:
    def wild(config: Config, folder: Path, acquisition_states: Sequence[GlobalState]) -> None:
        if "random" in str(folder):
            raise FedPPDError("it <diverged>")
        train(config, folder, acquisition_states)

    done = study(one, wild)
    assert done.failed == {("fedppd", "random"): "it <diverged>"}
    assert len(done.of("fedppd", "entropy")) == 3
    assert "fedppd, random: failed: it <diverged>" in notes(done)
    assert "it &lt;diverged&gt;" in (one.out / "report.html").read_text(encoding="utf-8")
    assert written(one)["failed"] == [{"method": "fedppd", "acquisition": "random", "reason": "it <diverged>"}]
    assert not study(one, train).failed


def test_a_cluster_that_cannot_be_had_is_not_asked_again(one: Plan) -> None:
    def no_cluster(*_: object) -> None:
        raise ResourceError("no Ray cluster")

    with pytest.raises(ResourceError):
        study(one, no_cluster)


def test_lost_checkpoints_are_named_with_the_remedy(one: Plan, train: Train) -> None:
    def first_only(config: Config, folder: Path, acquisition_states: Sequence[GlobalState]) -> None:
        if acquisition_states:
            raise KeyboardInterrupt
        train(config, folder, acquisition_states)

    with pytest.raises(KeyboardInterrupt):
        study(one, first_only)
    for path in (one.run("fedppd", "entropy", 0).folder / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    assert "remove that folder to train it again" in str(study(one, train).failed["fedppd", "entropy"])


def test_another_file_must_have_the_same_data_and_takes_our_seed_and_evaluation(
    file: Path, other: Callable[..., Path], tmp_path: Path
) -> None:
    path = other(seed=99, teacher={"rate": 0.5}, evaluation={"every": 9})
    mine = plan(file, f"fedppd,mine={path}", str(tmp_path)).configs["mine"]["random"]
    assert (mine.seed, mine.teacher.rate, mine.evaluation.every) == (3, 0.5, 1)
    path = other(federation={"clients": 2})
    with pytest.raises(ConfigError, match=r"mine: not the same data \(federation\.clients: 3 -> 2\)"):
        plan(file, f"mine={path}", str(tmp_path))
    path = other(active={"budget": 4})
    with pytest.raises(ConfigError, match="another active section"):
        plan(file, f"mine={path}", str(tmp_path))


def test_other_settings_in_the_same_folder_are_refused_before_anything_runs(
    one: Plan, file: Path, train: Train
) -> None:
    study(one, train)
    changed = plan(file, "fedppd", str(one.out), settings=["teacher.rate=0.2"])
    with pytest.raises(CheckpointError, match="another config"):
        study(changed, never)
    longer = plan(file, "fedppd", str(one.out), settings=["federation.rounds=2"])
    with pytest.raises(CheckpointError, match="was started for 1 rounds, not 2"):
        study(longer, never)


def test_the_table_has_a_column_a_number_of_labels_and_says_what_it_is_of(one: Plan, train: Train) -> None:
    done = study(one, train)
    head, *rows = cells(done)
    assert head[1:] == ["8", "16", "24"]
    assert [row[0] for row in rows] == ["fedppd, entropy", "fedppd, random"]
    assert rows[0][1] == rows[1][1]
    assert "1 rounds, iid partition, seed 3" in notes(done)[0]
