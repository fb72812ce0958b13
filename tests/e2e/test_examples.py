"""The examples, run as their READMEs say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

EXAMPLES = ROOT / "examples"
# The lines of a README in one process: starting `fedppd` anew for each would take most of the time.
_RUNNER = """
import json, os, runpy, sys
from fedppd_ray.cli.app import main
for words, options in json.load(sys.stdin):
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        continue
    sys.argv = [*words, *options]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""


def run(folder: Path, code: str, given: str = "", **variables: str) -> str:
    """Python code in a process that has the package of this checkout, and the folder's own modules if it is told so."""
    place = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(ROOT))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=given,
        cwd=folder,
        env={**os.environ, **variables, "PYTHONPATH": place},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(name: str, tmp_path: Path, *options: str) -> tuple[Path, str]:
    """Every indented line of the README, in a copy of the example; `export` begins a new process."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    shown, waiting, variables = "", [], {}
    for line in [*(folder / "README.md").read_text().splitlines(), "    export"]:
        words = shlex.split(line, comments=True) if line.startswith("    ") else []
        if words[:1] == ["export"]:
            shown += run(folder, _RUNNER, json.dumps(waiting), **variables) if waiting else ""
            waiting = []
            variables |= dict(word.split("=", 1) for word in words[1:])
        elif words:
            waiting.append((words, options if words[:2] == ["fedppd", "train"] else ()))
    return folder, shown


# Less of it: what is tested is that it runs, and that bits hold.
SMALL = ("federation.clients=2", "federation.rounds=2", "client.epochs=1")
OPTIONS = [word for change in SMALL for word in ("--set", change)]
# Serially, and in two parts, in one process.
_AGAIN = f"""
import fedppd_ray as fp
changes = [*{SMALL!r}, "data.root=scans"]
whole = fp.load_config("scans.yaml", changes)
fp.train(whole, "serially", serial=True)
fp.train(fp.load_config("scans.yaml", [*changes, "federation.rounds=1"]), "parts", serial=True)
fp.train(whole, "parts", serial=True, resume=True)
"""
# A server that does not allow the network, and one whose configuration does.
_SERVED = """
import json
from pathlib import Path
from fastapi.testclient import TestClient
from fedppd_ray.config.own_networks import allow
from fedppd_ray.errors import FedPPDError
from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
settings = Settings(run="run", allow_networks=["scan_nets:ScanNet"])
try:
    Predictor(settings, Metrics())
except FedPPDError as error:
    print(error)
allow(settings.allow_networks)
app = create_app(Predictor(settings, Metrics()), settings)
with TestClient(app) as client:
    scan = Path("scans/test/nodule/000.png").read_bytes()
    answer = client.post("/predict", content=scan, headers={"Content-Type": "image/png"})
    print(json.dumps(answer.json()["predictions"][0]))
"""


def test_an_own_network_trains_on_ray_is_opened_where_allowed_and_refused_elsewhere(tmp_path: Path) -> None:
    folder, shown = follow("own_network", tmp_path, *OPTIONS)
    best = re.findall(r"(?:clear|nodule) ([0-9.]+) %", shown)[-1]  # `predict` comes after `evaluate`
    run(folder, _AGAIN)
    weights = [(folder / name / "student/student.safetensors").read_bytes() for name in ("run", "serially", "parts")]
    assert weights[0] == weights[1] == weights[2]
    refusal, answer = run(folder, _SERVED, PYTHONPATH=".").strip().splitlines()
    assert "set FEDPPD_ALLOW_NETWORKS=scan_nets:ScanNet" in refusal
    assert 100 * max(json.loads(answer)["probabilities"]) == pytest.approx(float(best), abs=0.06)


def test_a_table_trains_and_predicts_as_csv(tmp_path: Path) -> None:
    _, shown = follow("table", tmp_path, "--serial", "--set", "federation.rounds=2")
    lines = shown.strip().splitlines()
    assert lines[-6] == "file,row,label,class_name,probability_0,probability_1,entropy,abstain,outside,ood"
    assert all(line.startswith("patients/new.csv,") for line in lines[-5:])


def test_an_own_method_is_listed_and_trains(tmp_path: Path) -> None:
    folder, shown = follow("own_method", tmp_path, "--serial", *OPTIONS)
    assert "fedprox" in shown
    assert (folder / "run/student/student.safetensors").exists()


def test_every_example_is_short() -> None:
    for path in EXAMPLES.glob("*/*.py"):
        assert len(path.read_text().splitlines()) < 60
