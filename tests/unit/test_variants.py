"""Variants of a method in place, results as a long table, completion, and errors that say who without a traceback."""

import csv
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command import Command, refused
from conftest import study_values

from fedppd_ray.cli import app as command_line
from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.reports.tidy import numbers, tidy
from fedppd_ray.studies.base import parse_methods
from fedppd_ray.studies.compared import Comparison, Outcome
from fedppd_ray.studies.comparison import plan
from fedppd_ray.workers.client import ClientWorker

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(study_values()))
    return path


# ---- variants


def test_a_variant_is_its_method_with_settings_of_its_own(file: Path, tmp_path: Path) -> None:
    methods = "fedppd,warm=fedppd:teacher.temperature=1,both=fedavg_student:baseline.rate=0.5:client.epochs=2"
    runs = {run.label: run for run in plan(file, methods, str(tmp_path / "out")).runs}
    plain, warm, both = (runs[label].config for label in ("fedppd", "warm", "both"))
    assert plain.values()["teacher"]["temperature"] == "4/N"
    assert warm.values()["teacher"]["temperature"] == 1
    assert {**warm.values(), "teacher": 0, "name": 0} == {**plain.values(), "teacher": 0, "name": 0}
    assert (both.method, both.values()["baseline"]["network"]) == ("fedavg", "student")
    assert (both.values()["baseline"]["rate"], both.client.epochs) == (0.5, 2)
    assert runs["warm"].folder == tmp_path / "out" / "warm" / "seed-0" or runs["warm"].folder.parent.name == "warm"


def test_a_setting_may_hold_a_colon(file: Path) -> None:
    sources = parse_methods("own=fedppd:student.network=my.nets:Net:client.epochs=2", file)
    assert sources["own"][1][-2:] == ("student.network=my.nets:Net", "client.epochs=2")


def test_another_file_is_still_another_file(file: Path) -> None:
    assert parse_methods("other=configs/mnist.yaml", file) == {"other": ("configs/mnist.yaml", ())}


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("warm=fedavg:teacher.temperature=1", r"warm: teacher\.temperature: method fedavg does not read it"),
        ("warm=fedppd:teacher.temprature=1", r"warm: teacher\.temprature: unknown key.*temperature"),
        ("warm=fedppd:seed=3", "seed is the same for all methods.*--set"),
        ("warm=fedppd:data.calibration=3", r"data\.calibration is the same for all"),
        ("warm=fedppd:federation.clients=3", r"federation\.clients is the same for all"),
        ("warm=fedppd", r"give it a setting of its own"),
        ("fedppd=fedppd:client.epochs=1", "must be a name"),
    ],
)
def test_a_variant_that_would_be_none_is_refused(file: Path, tmp_path: Path, variant: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(file, variant, str(tmp_path / "out"))


# ---- the long table


def test_results_have_a_row_per_method_seed_and_metric() -> None:
    figures = {
        "accuracy": 90.0,
        "score": "entropy",
        "scaled": {"ece": 1.5},
        "ood_auroc": None,
        "per_class": {"classes": [{"class": "cat", "recall": 80.0, "rows": 5}], "worst": "cat", "confusion": [[1]]},
    }
    history = [{"seconds": 2.0, "megabytes": 0.5}] * 3
    outcomes = [Outcome("a", seed, 3, "finished", None, figures, {}, history) for seed in (0, 1)]
    comparison = Comparison("x", {}, [*outcomes, Outcome("b", 0, 3, "failed", "why")], {})
    rows = list(csv.DictReader(io.StringIO(tidy(comparison))))
    assert list(rows[0]) == ["method", "seed", "metric", "value"]
    found = {(row["method"], row["seed"], row["metric"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows) == 12
    assert found["a", "1", "scaled.ece"] == 1.5
    assert found["a", "0", "per_class.cat.recall"] == 80
    assert (found["a", "0", "seconds"], found["a", "0", "megabytes"]) == (2.0, 1.5)


def test_every_number_of_real_figures_is_finite_and_named_once(finished_run: Path) -> None:
    import fedppd_ray as fp

    found = list(numbers(fp.Run(finished_run).evaluate()))
    assert len({name for name, _ in found}) == len(found) > 100
    assert all(math.isfinite(value) for _, value in found)
    assert "per_client.client-01.accuracy" in dict(found)


# ---- completion


def test_the_shell_is_offered_commands_configurations_and_keys(tmp_path: Path) -> None:
    """Asked as bash does: in a process of its own, under the name of the command."""
    (tmp_path / "queue.yaml").write_text("")
    script = "import sys; sys.argv = ['fedppd']; from fedppd_ray.cli.app import main; main()"

    def offered(words: str) -> list[str]:
        asked = {"_FEDPPD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        environment = os.environ | asked | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
        return done.stdout.split()

    assert offered("fedppd res") == ["resume"]
    assert offered("fedppd train qu") == ["quickstart", "queue.yaml"]
    assert offered("fedppd train quickstart --set federation.qu") == ["federation.quorum="]


# ---- errors


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("two\nlines")


def test_a_defect_is_one_line_and_a_traceback_only_with_debug(
    fedppd: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedppd_ray.runs.run import Run

    monkeypatch.setattr(Run, "evaluate", broken)
    done = fedppd("evaluate", finished_run)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "RuntimeError: two lines" in done.err
    assert "--debug" in done.err
    shown = fedppd("--debug", "evaluate", finished_run)
    assert shown.code == 1
    assert "Traceback (most recent call last)" in shown.err
    assert not fedppd("evaluate", finished_run).err.count("Traceback")
    assert command_line._debug is False


def test_a_users_mistake_has_a_traceback_only_with_debug(fedppd: Command, tmp_path: Path) -> None:
    refused(fedppd("evaluate", tmp_path), "no run folder")
    shown = fedppd("--debug", "evaluate", tmp_path)
    assert shown.code == 2
    assert "Traceback" in shown.err
    assert shown.err.splitlines()[-1].startswith("fedppd: ")


def test_whatever_goes_wrong_with_a_clients_rows_names_the_client(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ClientWorker(tiny(), ["client-00", "client-01"])
    real = Holdings.of

    def failing(self: Holdings, client: str) -> object:
        if client == "client-01":
            raise MemoryError("no room")
        return real(self, client)

    monkeypatch.setattr(Holdings, "of", failing)
    with pytest.raises(DataError, match="client-01: MemoryError: no room"):
        worker.describe()
