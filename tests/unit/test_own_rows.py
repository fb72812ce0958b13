"""Figures of each client on rows that it keeps back, asked for when a student is exported."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedppd_ray as fp
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.evaluation.own_rows import OwnFigures, as_sites
from fedppd_ray.inference.questions import answer_to, question_of
from fedppd_ray.inference.scores import Outputs
from fedppd_ray.runs.store import RunStore


@pytest.fixture
def run(tiny: Callable[..., Config], tmp_path: Path) -> fp.Run:
    """Two of three clients keep rows back."""
    test = load("mnist5k").test
    for name, rows in (("a", slice(0, 40)), ("b", slice(40, 60))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "images.npy", np.asarray(test.images[rows][:, 0]))
        np.save(tmp_path / name / "labels.npy", np.asarray(test.labels[rows]))
    clients = {"client-00": {"held_out": str(tmp_path / "a")}, "client-02": {"held_out": str(tmp_path / "b")}}
    return fp.train(tiny(federation={"rounds": 2}, clients=clients), tmp_path / "run", serial=True)


def test_evaluate_and_report_have_each_clients_own_figures(run: fp.Run) -> None:
    figures = run.evaluate()
    first, second = figures["per_site"]["sites"]
    assert (first["site"], first["rows"], second["site"], second["rows"]) == ("client-00", 40, "client-02", 20)
    student, test = run.student(), load("mnist5k").test
    answers = student.predict(np.asarray(test.images[:40]))
    right = np.mean([answer["label"] == label for answer, label in zip(answers, test.labels[:40], strict=True)])
    assert first["accuracy"] == pytest.approx(100 * right)
    assert first["abstained"] == pytest.approx(100 * np.mean([answer["abstain"] for answer in answers]))
    served = metrics_of(student.log_probabilities(np.asarray(test.images[:40])), np.asarray(test.labels[:40]))
    assert first["scaled_ece"] == pytest.approx(served.ece)
    worst = min((first, second), key=lambda line: line["accuracy"])["site"]
    assert figures["per_site"]["worst"] == worst
    page = Path(str(run.location)) / "report.html"
    from fedppd_ray.reports.run import write_report

    write_report(page.parent)
    assert f"none of them trained on; worst: {worst}" in page.read_text(encoding="utf-8")


def test_figures_of_another_round_are_not_those_of_the_student(run: fp.Run) -> None:
    path = Path(str(run.location)) / "client_figures.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "round": 1}))
    assert "per_site" not in run.evaluate()
    path.write_text("{")
    assert RunStore(path.parent).client_figures(2) == {}


def test_a_run_whose_clients_keep_nothing_asks_nobody(finished_run: Path) -> None:
    assert not (finished_run / "client_figures.json").exists()


def test_the_question_travels_as_data_and_its_answer_is_a_few_numbers() -> None:
    question = OwnFigures(temperature=2.0, score="entropy", threshold=1.0)
    assert question_of(json.loads(json.dumps(question.told()))) == question
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (30, 4))
    outputs = Outputs(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    answer = answer_to(question, outputs, generator.integers(0, 4, 30))
    assert answer is not None
    assert sum(value.size for value in answer.values()) == 7
    assert "abstained" not in (answer_to(OwnFigures(), outputs, generator.integers(0, 4, 30)) or {})


def test_nobody_answered() -> None:
    assert as_sites({}) == {}
