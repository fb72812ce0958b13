"""`fedppd predict --out`: answers for many rows on Ray Data, the same as without Ray, and no row lost when killed."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedppd_ray.api import predict_files
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.runs.run import Run
from tests.service.exports import COLUMNS, untrained_table
from tests.service.live import ROOT

PATIENTS = "age,ward,lab\n" + "".join(f'{20 + row % 70},"{("a", "b, c")[row % 2]}",{row % 9}\n' for row in range(50))


@pytest.fixture
def rows(digits: Any, tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.tile(np.array(digits.images[:100, 0]), (8, 1, 1)))
    return path


def command(run: Path, *more: object) -> list[str]:
    return [sys.executable, "-m", "fedppd_ray", "predict", str(run), *map(str, more)]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "r" * 40}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def test_a_job_that_is_killed_goes_on_where_it_was_and_equals_one_without_ray(
    digits_run: Path, rows: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    line = command(digits_run, rows, "--out", out, "--part-rows", 10)
    with log.open("wb") as output:
        job = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(out.glob("part-*")):
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    again = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert again.returncode == 0, again.stderr
    assert "800 rows" in again.stdout
    kept = {name: (out / name).stat().st_mtime_ns for name in before}
    assert kept == before, "what was written is not computed again"
    predict_files(digits_run, [rows], tmp_path / "serial", part_rows=10, serial=True)
    found, expected = (pd.read_parquet(folder) for folder in (out, tmp_path / "serial"))
    assert found["row"].tolist() == list(range(1, 801))
    assert found.drop(columns="probabilities").round(6).equals(expected.drop(columns="probabilities").round(6))
    np.testing.assert_allclose(np.stack(found["probabilities"]), np.stack(expected["probabilities"]), atol=1e-6)


def test_the_answers_are_those_of_predict(digits_run: Path, rows: Path, tmp_path: Path) -> None:
    assert predict_files(digits_run, [rows], tmp_path / "out", part_rows=300, coverage=0.8, serial=True) == 800
    expected = Run(digits_run).student().predict(np.load(rows)[:, None], 0.8)
    found = pd.read_parquet(tmp_path / "out")
    assert found["label"].tolist() == [answer["label"] for answer in expected]
    assert found["abstain"].tolist() == [answer["abstain"] for answer in expected]
    np.testing.assert_allclose(found["entropy"], [answer["entropy"] for answer in expected], atol=1e-6)


def test_sets_of_classes_come_along_where_a_confidence_is_asked_for(
    digits_run: Path, rows: Path, tmp_path: Path
) -> None:
    predict_files(digits_run, [rows], tmp_path / "out", confidence=0.9, serial=True)
    expected = Run(digits_run).student().predict(np.load(rows)[:, None], None, 0.9)
    assert [list(names) for names in pd.read_parquet(tmp_path / "out")["set"]] == [answer["set"] for answer in expected]
    with pytest.raises(ConfigError, match="confidence"):
        predict_files(digits_run, [rows], tmp_path / "other", confidence=1.5, serial=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_come_and_go_in_both_formats(tmp_path: Path, form: Any) -> None:
    untrained_table(tmp_path / "run", COLUMNS)
    (tmp_path / "in.csv").write_text(PATIENTS)
    pd.read_csv(tmp_path / "in.csv").to_parquet(tmp_path / "in.parquet", row_group_size=9)
    expected = Run(tmp_path / "run").predict([tmp_path / "in.csv"])
    for source in ("in.csv", "in.parquet"):
        out = tmp_path / f"{source}-{form}"
        predict_files(tmp_path / "run", [tmp_path / source], out, form=form, part_rows=20, serial=True)
        names = sorted(path.name for path in out.glob("part-*"))
        assert names == [f"part-{number:06d}.{form}" for number in range(3)]
        if form == "parquet":
            assert pd.read_parquet(out)["label"].tolist() == [answer["label"] for answer in expected]
            continue
        lines = [line for name in names for line in csv.DictReader((out / name).open())]
        assert [int(line["row"]) for line in lines] == list(range(1, 51))
        np.testing.assert_allclose(
            [float(line["probability_1"]) for line in lines],
            [answer["probabilities"][1] for answer in expected],
            atol=1e-6,
        )


def test_a_folder_of_another_job_is_refused(digits_run: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    predict_files(digits_run, [rows], out, part_rows=400, serial=True)
    before = contents(out)
    for other in ({"coverage": 0.5}, {"part_rows": 10}, {"form": "csv"}):
        with pytest.raises(ConfigError, match=next(iter(other)).replace("form", "format")):
            predict_files(digits_run, [rows], out, **({"part_rows": 400} | other), serial=True)  # type: ignore[arg-type]
    np.save(rows, np.zeros((800, 28, 28), np.uint8))
    with pytest.raises(ConfigError, match="inputs"):
        predict_files(digits_run, [rows], out, part_rows=400, serial=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        predict_files(digits_run, [rows], tmp_path / "full", serial=True)
    assert contents(out) == before


def test_a_row_that_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    untrained_table(tmp_path / "run", COLUMNS)
    (tmp_path / "in.csv").write_text("age,ward,lab\n" + "50,a,1\n" * 30 + "old,a,1\n")
    with pytest.raises(DataError, match="'old' is not a number"):
        predict_files(tmp_path / "run", [tmp_path / "in.csv"], tmp_path / "out", part_rows=20, serial=True)
    assert len(contents(tmp_path / "out")) == 1, "parts before it are there"


def test_options_of_a_batch_job_need_its_folder(digits_run: Path, rows: Path) -> None:
    line = command(digits_run, rows, "--serial")
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--out" in done.stderr
