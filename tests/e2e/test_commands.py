"""Each command once, on a finished run."""

import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import ROOT, fedppd, train

METRICS = {"round", "time", "accuracy", "nll", "ece", "mce", "brier", "seconds", "clients", "failed"}


def test_a_run_folder_holds_what_other_work_relies_on(uninterrupted):
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "student/student.safetensors",
        "student/model.json",
        "report.html",
        "plots/convergence.png",
        "plots/reliability.png",
        "plots/entropy.png",
        "plots/who_holds_what.png",
    ):
        assert (uninterrupted / name).exists(), name
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) >= METRICS for line in lines)
    assert yaml.safe_load((uninterrupted / "config.yaml").read_text())["federation"]["clients"] == 3


def test_evaluate_agrees_with_the_last_round_of_training(uninterrupted):
    done = fedppd("evaluate", uninterrupted, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    last = json.loads((uninterrupted / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("accuracy", "nll", "ece", "mce", "brier"):
        assert figures[key] == last[key], key
    assert 0 <= figures["ood_auroc"] <= 1


def test_predict_answers_for_a_digit_and_a_letter(uninterrupted, tmp_path):
    for name in ("mnist5k", "glyphs"):
        assert fedppd("data", "sample", name, tmp_path / f"{name}.png").returncode == 0
    done = fedppd("predict", uninterrupted, tmp_path / "mnist5k.png", tmp_path / "glyphs.png", "--json")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) == 2
    for answer in answers:
        assert abs(sum(answer["probabilities"]) - 1) < 1e-9
        assert answer["label"] == max(range(10), key=answer["probabilities"].__getitem__)


def test_the_report_can_be_made_again(uninterrupted):
    (uninterrupted / "report.html").unlink()
    done = fedppd("report", uninterrupted)
    assert done.returncode == 0, done.stderr
    plots = list((uninterrupted / "plots").glob("*.png"))
    assert len(plots) >= 4
    assert (uninterrupted / "report.html").read_text().count("data:image/png;base64") >= len(plots)


def test_a_second_run_into_the_same_folder_is_refused(uninterrupted):
    done = train(uninterrupted)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_resuming_with_another_config_is_refused_with_the_difference(uninterrupted):
    done = train(uninterrupted, "--resume", "--set", "teacher.rate=0.5")
    assert done.returncode == 2
    assert "teacher.rate: 0.12 -> 0.5" in done.stderr


def test_an_address_without_a_cluster_is_one_readable_line(tmp_path):
    done = train(tmp_path / "run", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("fedppd: no Ray cluster at 127.0.0.1:1")
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(600)  # three and a half minutes here, beside another test on the same two cores
def test_quickstart_reaches_ninety_percent_from_clients_with_two_major_classes(tmp_path):
    out = tmp_path / "quickstart"
    fewer = ["--set", "federation.rounds=8", "--set", "evaluation.every=8"]  # of 20: enough
    done = fedppd("train", ROOT / "configs/quickstart.yaml", "--out", out, *fewer, timeout=560)
    assert done.returncode == 0, done.stderr
    figures = json.loads(fedppd("evaluate", out, "--json").stdout)
    assert figures["accuracy"] >= 90
    assert figures["ood_auroc"] > 0.85
    for info in json.loads((out / "clients.json").read_text())["clients"]:
        assert sum(count > 20 for count in info["class_counts"]) <= 2


def test_every_config_of_the_repository_is_valid():
    from fedppd_ray.config.file import load_config

    paths = sorted(Path(ROOT / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_config(path).name == path.stem
