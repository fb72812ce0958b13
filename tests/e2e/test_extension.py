"""A method, a network and a score from outside the package train on Ray, compare and serve: no file of it changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

OUTSIDE = Path(__file__).parents[1] / "outside"
PLUGINS = "half_step,flat_net,margin"
CONFIG = {
    "name": "outside",
    "method": "half_step",
    "data": {"name": "mnist5k", "calibration": 100, "partition": {"kind": "iid", "rows_per_client": 60}},
    "federation": {"clients": 2, "rounds": 2},
    "client": {"epochs": 2, "batch_size": 20},
    "half_step": {"share": 0.25},
    "baseline": {"rate": 0.1},
    "teacher": {"network": "flat_net"},
    "evaluation": {"score": "margin"},
}
ASK = """
import sys
from starlette.testclient import TestClient
from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
settings = Settings(run=sys.argv[1])
with TestClient(create_app(Predictor(settings, Metrics()), settings)) as client:
    body = open(sys.argv[2], "rb").read()
    print(client.post("/predict", content=body, headers={"Content-Type": "image/png"}).text)
"""


def run(*words: str, plugins: str = PLUGINS) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(OUTSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "FEDPPD_PLUGINS": plugins}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240)


def fedppd(*words: str, plugins: str = PLUGINS) -> subprocess.CompletedProcess[str]:
    return run("-m", "fedppd_ray", *words, plugins=plugins)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside.yaml").write_text(yaml.safe_dump(CONFIG))
    done = fedppd("train", str(folder / "outside.yaml"), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_they_train_on_ray_and_the_card_names_them(trained: Path) -> None:
    card = json.loads((trained / "run" / "student" / "model.json").read_text())
    assert (card["method"], card["network"], card["abstention"]["score"]) == ("half_step", "flat_net", "margin")
    assert 0 < card["abstention"]["threshold"] <= 1


def test_the_same_bits_without_ray(trained: Path) -> None:
    done = fedppd("train", str(trained / "outside.yaml"), "--out", str(trained / "serial"), "--serial")
    assert done.returncode == 0, done.stderr
    versions = [
        json.loads((trained / name / "student" / "model.json").read_text())["version"] for name in ("run", "serial")
    ]
    assert versions[0] == versions[1]


def test_they_stand_in_a_comparison(trained: Path) -> None:
    out = trained / "compared"
    words = ["compare", str(trained / "outside.yaml"), "--methods", "fedavg,half_step", "--rounds", "1", "--serial"]
    done = fedppd(*words, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    methods = json.loads((out / "results.json").read_text())["methods"]
    assert {label: method["runs"][0]["status"] for label, method in methods.items()} == {
        "fedavg": "finished", "half_step": "finished",
    }  # fmt: skip
    assert any(line.startswith("half_step.share") for line in methods["half_step"]["differs_from_first"])


def test_they_are_served_where_they_are_installed_and_refused_where_they_are_not(trained: Path) -> None:
    digit = trained / "digit.png"
    assert fedppd("data", "sample", "mnist5k", str(digit)).returncode == 0
    answer = json.loads(run("-c", ASK, str(trained / "run"), str(digit)).stdout.splitlines()[-1])
    assert len(answer["predictions"][0]["probabilities"]) == 10
    refused = fedppd("predict", str(trained / "run"), str(digit), plugins="")
    assert refused.returncode == 2
    assert "flat_net" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_plugin_that_is_not_there_is_named(trained: Path) -> None:
    done = fedppd("train", str(trained / "outside.yaml"), "--out", str(trained / "never"), plugins="no_such_plugin")
    assert done.returncode == 2
    assert "no_such_plugin: cannot be imported" in done.stderr
