"""`fedppd promote`, `rollback` and `registry`: exit codes, one line on stderr, and what is printed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command, refused

from fedppd_ray.releases.registry import Registry
from fedppd_ray.runs.export import export_student, read_student
from fedppd_ray.runs.store import RunStore


@pytest.fixture
def gates(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "gates.yaml"
        path.write_text(text)
        return path

    return write


def another(finished: Path, folder: Path) -> Path:
    run = Path(shutil.copytree(finished, folder / "another"))
    card, model = read_student(run)
    model.weights.mul_(1.001)
    export_student(run, RunStore(run).config(), 7, model, card["metrics"], card["abstention"])
    return run


def test_a_version_goes_in_is_refused_is_forced_and_comes_back(
    fedppd: Command,
    finished_run: Path,
    tmp_path: Path,
    gates: Callable[[str], Path],
) -> None:
    place = tmp_path / "registry"
    rules = gates("offline: {accuracy: {at_least: 0}}")
    done = fedppd("promote", finished_run, "--to", place, "--gates", rules, "--by", "ada")
    assert done.code == 0, done
    first = str(Registry.open(place).state().current)
    assert f"{first} is current" in done.out

    run = another(finished_run, tmp_path)
    gates("offline: {accuracy: {at_least: 100.1}}")
    done = fedppd("promote", run, "--to", place, "--gates", rules, "--by", "ada")
    assert done.code == 1
    assert len(done.err.strip().splitlines()) == 1
    assert "is refused: gates not met: accuracy" in done.err
    assert "NOT MET" in done.out
    assert Registry.open(place).state().current == first

    done = fedppd("promote", run, "--to", place, "--gates", rules, "--force", "--reason", "a fire", "--json")
    assert done.code == 0, done
    assert json.loads(done.out)["forced"] is True
    second = str(Registry.open(place).state().current)
    rows = json.loads(fedppd("registry", "list", place, "--json").out)
    assert [(row["version"], row["status"]) for row in rows] == [(first, ""), (second, "current")]

    done = fedppd("rollback", place, "--reason", "the fire is out")
    assert (done.code, done.out) == (0, f"{second} is rolled back; current is {first}\n")
    log = [json.loads(line) for line in fedppd("registry", "log", place, "--json").out.splitlines()]
    assert [(line["what"], line["forced"]) for line in log] == [
        ("promoted", False),
        ("refused", False),
        ("promoted", True),
        ("rolled back", False),
    ]
    assert (log[0]["who"], "a fire" in log[2]["why"], "the fire is out" in log[3]["why"]) == ("ada", True, True)
    shown = fedppd("registry", "show", place, second)
    assert "forced" in shown.out
    assert "Reason given: a fire" in shown.out
    assert json.loads(fedppd("registry", "show", place, "--json").out)["version"] == first


def test_a_mistake_is_one_line_and_exit_code_2(
    fedppd: Command,
    finished_run: Path,
    tmp_path: Path,
    gates: Callable[[str], Path],
) -> None:
    place = tmp_path / "registry"
    refused(fedppd("promote", finished_run, "--to", place, "--force"), "--reason")
    refused(fedppd("promote", finished_run, "--to", place, "--shadow", 0.5, "--canary", 0.5), "choose one")
    refused(fedppd("promote", finished_run, "--to", place, "--gates", gates("offline: {ecc: {}}")), "ece")
    refused(fedppd("promote", finished_run, "--to", place, "--gates", tmp_path / "none.yaml"), "cannot be read")
    refused(fedppd("promote", finished_run, "--to", finished_run), "holds something else")
    refused(fedppd("promote", tmp_path / "nowhere", "--to", place), "is it a finished run")
    refused(fedppd("promote", "3-0123456789ab-01234567", "--to", place), "has no version")
    refused(fedppd("promote", finished_run, "--to", place, "--shadow", 0.5), "nothing is current yet")
    refused(fedppd("rollback", place), "nothing was current before")
    refused(fedppd("rollback", place, "--candidate"), "no candidate")
    refused(fedppd("rollback", tmp_path / "nowhere"), "is no registry")
    refused(fedppd("registry", "list", finished_run), "is no registry")
    refused(fedppd("registry", "show", place), "nothing is current yet")
    refused(fedppd("registry", "show", place, "../../x"), "has no version")
