"""What the report says besides the figures: when and how, who was dropped, what is doubtful, what the words mean."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from PIL import Image

import fedppd_ray as fp
from fedppd_ray.config.schema import Config
from fedppd_ray.data.pictures import picture_bytes
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.reports.about import _span, about_table, dropped_clients
from fedppd_ray.reports.glossary import glossary
from fedppd_ray.reports.run import write_report
from fedppd_ray.runs.run import evaluate_run


@pytest.fixture(scope="module")
def page(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("page") / "run"
    shutil.copytree(finished_run, run)
    return write_report(run).read_text(encoding="utf-8")


def line(started: str, **more: Any) -> dict[str, Any]:
    return {"started": started, "first_round": 1, "command": None, "version": "0.9", "host": "node-a", "pid": 1, **more}


def test_the_page_says_when_by_which_command_and_how_long(tiny: Callable[..., Config]) -> None:
    history = [
        {"round": 1, "seconds": 100.0, "time": "2026-03-01T10:02:00+00:00"},
        {"round": 2, "seconds": 4000.0, "time": "2026-03-03T11:00:00+00:00"},
    ]
    journal = [
        line("2026-03-01T10:00:00+00:00", command="fedppd train <a>"),
        line("2026-03-03T09:50:00+00:00", command="fedppd resume runs/x", first_round=2),
    ]
    text = about_table(tiny(), history, journal, 3)
    assert "fedppd on mnist5k, 3 clients" in text
    assert "<th>rounds</th><td>2 of 3</td>" in text
    assert "1 h 8 min in rounds, 2 d 1 h from start to last round (2026-03-03 11:00 UTC)" in text
    assert "<th>started</th><td>2026-03-01 10:00 UTC on node-a, fedppd 0.9</td>" in text
    assert "resumed 1 times, last" in text
    assert "<th>command</th><td>fedppd resume runs/x</td>" in text
    assert f"fedppd {fp.__version__}" in text
    assert "fedppd train &lt;a&gt;" in about_table(tiny(), history, journal[:1], 3)


def test_a_run_of_an_earlier_version_has_no_journal_and_no_times(tiny: Callable[..., Config]) -> None:
    text = about_table(tiny(), [{"round": 1, "seconds": 7.0}], [], 3)
    assert "<td>7 s in rounds</td>" in text
    assert "command" not in text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (273600, "3 d 4 h")]
)
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert _span(seconds) == shown


def test_dropped_clients_are_listed_by_name_the_worst_first() -> None:
    lost = [("a", 1), ("b", 1), ("b", 2), *(("c", round_id) for round_id in range(1, 15))]
    history = [
        {
            "round": round_id,
            "failures": [{"client": who, "reason": f"late in {when}"} for who, when in lost if when == round_id],
        }
        for round_id in range(1, 21)
    ]
    text = dropped_clients(history)
    assert re.findall(r"<tr><td>(\w)</td><td>(\d+)</td>", text) == [("c", "14"), ("b", "2"), ("a", "1")]
    assert "<td>1, 2</td><td>late in 2</td>" in text
    assert "12, …" in text
    assert "of 20 rounds" in text
    assert dropped_clients([{"round": 1, "failures": []}]) == ""


def test_the_page_shows_the_rows_with_the_highest_score(page: str, finished_run: Path) -> None:
    evaluation = evaluate_run(finished_run)
    assert evaluation.scores is not None
    expected = np.argsort(-evaluation.scores, kind="stable")[:12]
    shown = [int(row) - 1 for row in re.findall(r'alt="held-out row (\d+)"', page)]
    assert shown == expected.tolist()
    sources = re.findall(r'class=example alt="[^"]+" src="data:image/png;base64,([^"]+)"', page)
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(sources[0]))))
    images = HeldOut(fp.Run(finished_run).config()).images("test")
    assert np.array_equal(picture, images[shown[0]][0])
    label = evaluation.labels[shown[0]]
    says = evaluation.log_probabilities[shown[0]].argmax()
    caption = re.findall(r"<figcaption>(.*?)</figcaption>", page)[0]
    assert caption.startswith(f"row {shown[0] + 1}: says {says}, ")
    assert caption.endswith("right" if label == says else f"is {label}")


def test_examples_can_be_left_out(fedppd: Command, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    assert fedppd("report", run, "--no-examples").code == 0
    assert "Most doubtful" not in (run / "report.html").read_text(encoding="utf-8")


def test_the_page_has_figures_per_class_and_client_and_explains_its_measures(page: str) -> None:
    for heading in ("Per client: test rows weighted", "Per class: mean recall", "Confusion", "What the measures mean"):
        assert heading in page
    for name in ("NLL", "ECE", "OOD AUROC", "abstains", "recall, precision"):
        assert f"<dt>{name}</dt>" in page


def test_the_glossary_leaves_out_what_a_report_does_not_have() -> None:
    text = glossary({"accuracy": 1.0, "ood_auroc": None})
    assert re.findall("<dt>(.*?)</dt>", text) == ["accuracy"]


def test_the_page_has_a_dark_side(page: str) -> None:
    assert "prefers-color-scheme:dark" in page


def test_many_rounds_are_folded(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    lines = [json.dumps({**record, "round": round_id}) for round_id in range(1, 60)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "<summary>All 59 rounds</summary>" in write_report(run, examples=False).read_text(encoding="utf-8")


def test_rows_of_a_table_are_told_by_number(tmp_path: Path) -> None:
    config = fp.load_config("hospital", {"federation.rounds": 1, "client.epochs": 1})
    fp.train(config, tmp_path / "run", serial=True)
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "<th>test row</th><th>it is</th><th>the student says</th><th>score</th>" in text
    assert "class=example" not in text


def test_pictures_of_other_ranges_and_channels_become_eight_bits() -> None:
    floats = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 3, 4)
    picture = np.asarray(Image.open(io.BytesIO(picture_bytes(floats, (0.0, 1.0)))))
    assert (picture.dtype, picture.min(), picture.max()) == (np.uint8, 0, 255)
    colour = np.arange(36, dtype=np.uint8).reshape(3, 3, 4)
    shown = np.asarray(Image.open(io.BytesIO(picture_bytes(colour, (0.0, 255.0)))))
    assert np.array_equal(shown, colour.transpose(1, 2, 0))
    two = np.asarray(Image.open(io.BytesIO(picture_bytes(colour[:2], (0.0, 255.0)))))
    assert np.array_equal(two, colour[0])
