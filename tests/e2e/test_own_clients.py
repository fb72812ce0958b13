"""Clients as they are: four folders of PNGs, or four CSV files, under names of their own, and ten lines of YAML."""

import csv
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from fedppd_ray.runs.run import Run
from tests.e2e.conftest import fedppd, student_digest
from tests.service.live import HEADERS, fedppd_serve

NAMES = ("berlin", "london", "oslo", "rome")
SIDE = 12
TEN_LINES = """\
name: {name}
data: {{name: {kind}, root: {root}/common{table}}}
federation: {{rounds: 8, share_class_counts: true}}
client: {{epochs: 5, batch_size: 20}}
evaluation: {{coverage: 0.9}}
clients:
  berlin: {{data: {root}/berlin{suffix}}}
  london: {{data: {root}/london{suffix}}}
  oslo: {{data: {root}/oslo{suffix}}}
  rome: {{data: {root}/rome{suffix}}}
"""


def write_pictures(folder: Path, rows: int, seed: int) -> None:
    """A bright half, the upper or the lower one, under much noise."""
    generator = np.random.default_rng(seed)
    for row in range(rows):
        upper = row % 2
        image = generator.integers(0, 200, (SIDE, SIDE)).astype(np.uint8)
        image[slice(0, SIDE // 2) if upper else slice(SIDE // 2, SIDE)] += 12
        place = folder / ("upper" if upper else "lower")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"patient-{seed}-{row:03d}.png")


def write_table(path: Path, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("age", "ward", "outcome"))
        for age, ward in zip(generator.normal(60, 12, rows), generator.integers(3, size=rows), strict=True):
            writer.writerow((f"{age:.2f}", "abc"[ward], "ill" if age + 8 * (ward == 2) > 62 else "well"))


def listing(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))}


def trained(data: Path, out: Path, kind: str, table: str = "", suffix: str = "") -> Path:
    """By Ray and without it, from one file of ten lines: the same bits. Nothing is written among the data."""
    text = TEN_LINES.format(name=kind, kind=kind, root=data, table=table, suffix=suffix)
    assert len(text.splitlines()) == 10
    (out / f"{kind}.yaml").write_text(text)
    before = listing(data)
    for name, extra in (("ray", ()), ("serial", ("--serial",))):
        done = fedppd("train", out / f"{kind}.yaml", "--out", out / name, *extra)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "NOTHING WILL ABSTAIN" not in done.stderr + done.stdout
    assert student_digest(out / "ray") == student_digest(out / "serial")
    cards = [(out / name / "student" / "model.json").read_text() for name in ("ray", "serial")]
    assert cards[0] == cards[1]  # temperature and threshold too
    assert listing(data) == before
    return out / "ray"


def check_figures(run: Path) -> None:
    done = fedppd("evaluate", run, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["accuracy"] > 70
    assert 0 < figures["abstention"]["coverage"] <= 100
    assert [line["client"] for line in figures["per_client"]["by_client"]] == list(NAMES)
    report = (run / "report.html").read_text()
    assert all(name in report for name in NAMES)
    assert "client-0" not in report


def test_four_folders_of_pictures_train_evaluate_abstain_and_are_served(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    out.mkdir()
    for seed, name in enumerate(NAMES):
        write_pictures(data / name, 80 + 20 * seed, seed)
    write_pictures(data / "common" / "test", 120, 9)
    run = trained(data, out, "folder")
    check_figures(run)
    card = Run(run).card()
    assert (card["abstention"]["rows"], card["abstention"]["clients"]) == (10 + 10 + 12 + 14, 4)
    pictures = sorted((data / "common").rglob("*.png"))
    answers = Run(run).predict(pictures)
    assert any(answer["abstain"] for answer in answers)
    assert not all(answer["abstain"] for answer in answers)
    unsure = next(at for at, answer in enumerate(answers) if answer["abstain"])
    with fedppd_serve(run, tmp_path / "serve.log") as server:
        for at in (unsure, next(at for at, answer in enumerate(answers) if not answer["abstain"])):
            served = httpx.post(
                f"{server.url}/predict",
                content=pictures[at].read_bytes(),
                headers={**HEADERS, "Content-Type": "image/png"},
                timeout=60,
            ).json()
            served = served.get("predictions", [served])[0]
            assert served["abstain"] == answers[at]["abstain"]
            assert served["probabilities"] == pytest.approx(answers[at]["probabilities"], abs=1e-6)


def test_four_tables_train_evaluate_and_abstain(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    out.mkdir()
    for seed, name in enumerate(NAMES):
        write_table(data / f"{name}.csv", 80 + 20 * seed, seed)
    write_table(data / "common" / "test.csv", 120, 9)
    run = trained(data, out, "table", ", table: {target: outcome}", ".csv")
    check_figures(run)
    answers = Run(run).predict([data / "common" / "test.csv"])
    assert any(answer["abstain"] for answer in answers)
    assert not all(answer["abstain"] for answer in answers)
