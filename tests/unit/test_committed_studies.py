"""The studies in docs/results are finished, and a setting that comes later leaves them so."""

from pathlib import Path

import pytest

from fedppd_ray.config import schema
from fedppd_ray.studies import active, comparison
from fedppd_ray.studies.base import StudyRun, finished

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
RECOMMENDED = f"recommended={ROOT / 'configs' / 'cifar10_small_recommended.yaml'}"
BASELINES = "fedavg,fedbe,fedswag,fedpa,fedppd,fedppd_distill"
# Study → methods and rounds of the command that made it (README, Results).
COMPARED = {
    "cifar10_small": (f"fedavg_student,{BASELINES},{RECOMMENDED}", None),
    "mnist": (BASELINES, None),
    "cifar10": ("fedavg,fedppd,fedppd_distill", 20),
}


def runs_of(study: str) -> list[StudyRun]:
    config = ROOT / "configs" / f"{study}.yaml"
    if study in COMPARED:
        methods, rounds = COMPARED[study]
        return list(comparison.plan(config, methods, str(RESULTS / study), rounds=rounds).runs)
    planned = active.plan(config, "fedavg_student,fedppd", str(RESULTS / study))
    return [planned.run(*series, step) for series in planned.series for step in range(planned.steps)]


def test_every_committed_study_is_known_here() -> None:
    assert {path.parent.name for path in RESULTS.glob("*/results.json")} == {*COMPARED, "active_quickstart"}


@pytest.mark.parametrize("study", [*COMPARED, "active_quickstart"])
def test_a_committed_study_is_finished(study: str) -> None:
    assert [run.folder for run in runs_of(study) if finished(run) is None] == []


@pytest.mark.parametrize("study", [*COMPARED, "active_quickstart"])
def test_a_committed_study_stays_finished_when_a_setting_with_a_default_is_added(
    study: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    class Later(schema.Config):
        novelty: int = 7

    monkeypatch.setattr(schema, "Config", Later)
    schema.config_class.cache_clear()
    request.addfinalizer(schema.config_class.cache_clear)
    runs = runs_of(study)
    assert all(run.config.model_dump()["novelty"] == 7 for run in runs)
    assert [run.folder for run in runs if finished(run) is None] == []


def test_another_setting_is_another_run() -> None:
    run = runs_of("mnist")[0]
    assert finished(run) is not None
    other = run.config.client.model_copy(update={"epochs": 9})
    changed = StudyRun(run.label, run.seed, run.config.model_copy(update={"client": other}), run.folder)
    assert finished(changed) is None
