"""The `fedppd` command: exit codes, one line on stderr, no stack trace."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import Command, Done, refused

from fedppd_ray import __version__
from fedppd_ray.data.pictures import write_sample

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("name: test\nfederation: {rounds: 1}\n")
    return path


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("federation.clients=0", ["federation.clients"]),
        ("federation.cliens=3", ["federation.cliens", "did you mean 'clients'?"]),
        ("federation.rounds=many", ["federation.rounds"]),
        ("data.partition.major=11", ["data.partition.major", "at most 10"]),
        ("data.name=minst", ["data.name", "did you mean 'mnist'?"]),
        ("student.network=resnet18", ["student.network"]),
        ("federation.rounds", ["--set federation.rounds", "key=value"]),
        ("Seed=1", ["Seed", "did you mean 'seed'?"]),
    ],
)
def test_an_impossible_setting_exits_with_2_and_one_line_naming_the_key(
    fedppd: Command, config: Path, tmp_path: Path, setting: str, parts: list[str]
) -> None:
    refused(fedppd("train", config, "--out", tmp_path / "run", "--set", setting), *parts)
    assert not (tmp_path / "run").exists()


def test_a_missing_configuration_exits_with_2(fedppd: Command, tmp_path: Path) -> None:
    refused(fedppd("train", tmp_path / "absent.yaml"), "absent.yaml", "give the path of a YAML file")


def test_a_broken_configuration_exits_with_2(fedppd: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("federation: {rounds: 1\n  - x: [\n")
    refused(fedppd("train", tmp_path / "bad.yaml"), "bad.yaml", "not valid YAML")


def test_resuming_nothing_exits_with_2(fedppd: Command, config: Path, tmp_path: Path) -> None:
    done = fedppd("train", config, "--out", tmp_path / "run", "--resume", "--serial")
    refused(done, "holds no run to resume")


def test_resuming_another_configuration_exits_with_2_and_the_difference(fedppd: Command, finished_run: Path) -> None:
    arguments = ["--out", finished_run, "--set", "seed=9", "--resume", "--serial"]
    refused(fedppd("train", finished_run / "config.yaml", *arguments), "seed: 3 -> 9")


def test_training_over_an_old_run_exits_with_2(fedppd: Command, finished_run: Path) -> None:
    done = fedppd("train", finished_run / "config.yaml", "--out", finished_run, "--serial")
    refused(done, "already holds a run", "--resume")


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_a_folder_that_is_no_run_exits_with_2(fedppd: Command, tmp_path: Path, command: str) -> None:
    refused(fedppd(command, tmp_path), str(tmp_path), "no run folder")


def test_predicting_with_no_run_or_no_image_exits_with_2(fedppd: Command, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("text")
    refused(fedppd("predict", tmp_path, tmp_path / "text.png"), "model.json")
    refused(fedppd("predict", finished_run, tmp_path / "text.png"), "text.png", "cannot be read as an image")
    refused(fedppd("predict", finished_run, tmp_path / "absent.png"), "absent.png")


def test_an_unknown_data_set_exits_with_2(fedppd: Command, tmp_path: Path) -> None:
    refused(fedppd("data", "prepare", "nothing"), "nothing", "choose one of")
    refused(fedppd("data", "sample", "nothing", tmp_path / "x.png"), "nothing")
    refused(fedppd("data", "sample", "mnist5k", tmp_path / "x.png", "--index", 1000), "1000 held-out rows")


def test_evaluate_prints_json_that_a_program_can_read(fedppd: Command, finished_run: Path) -> None:
    done = fedppd("evaluate", finished_run, "--json")
    assert done.code == 0
    assert json.loads(done.out)["rows"] == 1000


def test_evaluate_prints_a_table_for_people(fedppd: Command, finished_run: Path) -> None:
    done = fedppd("evaluate", finished_run)
    assert done.code == 0
    assert all(word in done.out for word in ("accuracy", "ECE", "OOD AUROC", "nats"))


def test_predict_prints_an_answer_an_image(fedppd: Command, finished_run: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for index, file in enumerate(files):
        write_sample("mnist5k", index, file, None)
    answers = json.loads(fedppd("predict", finished_run, *files, "--json").out)
    assert [answer["image"] for answer in answers] == [str(file) for file in files]
    assert sum(answers[0]["probabilities"]) == pytest.approx(1)
    table = fedppd("predict", finished_run, *files)
    assert table.code == 0
    assert "a.png" in table.out
    assert "nats" in table.out


def test_data_prepare_and_sample_say_what_they_did(fedppd: Command, tmp_path: Path) -> None:
    assert "mnist5k: 4000 training and 1000 test rows" in fedppd("data", "prepare", "mnist5k").out
    done = fedppd("data", "sample", "glyphs", tmp_path / "x.png")
    assert done.code == 0
    assert "out of distribution" in done.out
    assert (tmp_path / "x.png").exists()


def test_an_out_of_distribution_set_is_prepared_without_its_training_rows(fedppd: Command, tmp_path: Path) -> None:
    (tmp_path / "SVHN").mkdir()
    np.save(tmp_path / "SVHN" / "test_images.npy", np.zeros((3, 32, 32, 3), np.uint8))
    np.save(tmp_path / "SVHN" / "test_labels.npy", np.arange(3))
    arguments = ["data", "prepare", "svhn", "--root", tmp_path, "--test-only"]
    assert "svhn: 3 test rows" in fedppd(*arguments).out
    refused(fedppd(*arguments, "--out", tmp_path / "own"), "--test-only", "--out")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["train", "evaluate", "predict", "report", "data"]),
        (["train"], ["CONFIG", "--out", "--set", "--resume", "--address"]),
        (["compare"], ["CONFIG", "--methods", "--seeds", "--rounds", "fedppd methods"]),
        (["evaluate"], ["RUN", "--json"]),
        (["predict"], ["RUN", "FILE", "--json"]),
        (["report"], ["RUN"]),
        (["data"], ["prepare", "sample"]),
        (["data", "prepare"], ["NAME", "--root", "--test-only"]),
        (["data", "sample"], ["NAME", "--index"]),
    ],
)
def test_every_command_explains_itself(fedppd: Command, command: list[str], words: list[str]) -> None:
    done = fedppd(*command, "--help")
    assert done.code == 0
    assert all(word in done.out for word in words)


def test_the_module_is_the_command_and_help_answers_without_torch_or_ray() -> None:
    script = (
        "import sys, runpy; sys.argv = ['fedppd', '--version']\n"
        "try: runpy.run_module('fedppd_ray', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print(sorted({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines() == [f"fedppd {__version__}", "[]"], done


def test_a_broken_configuration_ends_the_real_process_with_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedppd_ray", "train", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    refused(Done(done.returncode, done.stdout, done.stderr), "absent.yaml")


def test_methods_are_listed_with_a_line_each() -> None:
    from fedppd_ray.config.nouns import METHODS

    for name in METHODS:
        first = str(METHODS[name].__doc__).strip().split("\n")[0]
        assert first != "None", name
        assert first.endswith("."), name
