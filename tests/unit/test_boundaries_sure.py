"""How sure a student is, exactly: temperature in every answer, corruptions as strong as they say, cards that hold."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedppd_ray.config.file import load_for_method
from fedppd_ray.data.corruptions import corrupted
from fedppd_ray.errors import CheckpointError
from fedppd_ray.evaluation.corrupted import corruption_figures
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.evaluation.run import evaluate_predictor
from fedppd_ray.inference.card import checked_card
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.scores import entropy, score_named
from fedppd_ray.inference.student import Student
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.store import RunStore

# ---- temperature


def test_an_answer_is_at_the_cards_temperature_whatever_its_score_looks_at(finished_run: Path) -> None:
    config, (card, model) = RunStore(finished_run).config(), read_student(finished_run)
    rows = np.asarray(HeldOut(config).images("test")[:20])
    raw = HeldOut(config).outputs(network_predictor(model), rows)
    card = {**card, "temperature": 2.0, "abstention": {**card["abstention"], "score": "energy"}}
    evidence = Student(card, model).evidence(rows)
    np.testing.assert_allclose(evidence[:, :-1], scaled(raw.log_probabilities, 2.0), atol=1e-6)
    np.testing.assert_allclose(evidence[:, -1], score_named("energy").of(raw), rtol=1e-5)


def test_foreign_rows_are_scored_as_they_are_served(finished_run: Path) -> None:
    config, (card, model) = RunStore(finished_run).config(), read_student(finished_run)
    predict = network_predictor(model)
    seen = evaluate_predictor(config, predict, card={**card, "temperature": 3.0})
    raw = HeldOut(config).log_probabilities(predict, "ood")
    assert seen.ood_scores is not None
    np.testing.assert_allclose(seen.ood_scores, entropy(scaled(raw, 3.0)), atol=1e-9)


# ---- corruptions


def test_noise_has_the_deviation_that_is_stated_and_stays_within_bytes() -> None:
    grey = np.full((64, 1, 32, 32), 128, np.uint8)
    noise = corrupted(grey, "gaussian_noise", 1).astype(float) - 128  # 0.04 of 255; nothing is cut off
    error = 10.2 / np.sqrt(2 * noise.size)
    assert noise.std() == pytest.approx(np.sqrt(10.2**2 + 1 / 12), abs=6 * error)  # 1/12: rounding
    white = np.full((1, 1, 8, 8), 250, np.uint8)
    assert (corrupted(white, "brightness", 5) == 255).all()


def test_a_corruptions_scaled_ece_is_that_of_scaled_answers(finished_run: Path) -> None:
    config, (_, model) = RunStore(finished_run).config(), read_student(finished_run)
    held_out, predict = HeldOut(config), network_predictor(model)
    found = corruption_figures(held_out, predict, 2.0)["contrast"][2]
    worse = corrupted(held_out.images("test"), "contrast", 3)
    raw = held_out.outputs(predict, worse).log_probabilities
    for key, seen in (("ece", raw), ("scaled_ece", scaled(raw, 2.0))):
        assert found[key] == pytest.approx(metrics_of(seen, held_out.labels("test")).ece)
    assert found["ece"] != found["scaled_ece"]


# ---- model cards

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda card: card["abstention"]["table"].pop(), r"abstention: .*lacks the row of coverage 1"),
        (lambda card: card.update(round="3"), r"round: .*valid integer"),
        (lambda card: card["normalisation"]["mean"].append(0.5), r".*a mean and a std for each channel"),
        (lambda card: card["normalisation"].update(range=[255.0, 0.0]), r"normalisation: .*least and the largest"),
        (lambda card: card["normalisation"].update(range=[1.0, 1.0]), r"normalisation: .*least and the largest"),
        (lambda card: card["conformal"]["table"][0]["thresholds"].append(0.5), r".*a threshold, or one for each class"),
        (lambda card: card["conformal"].update(guarantee="per site"), r"conformal\.guarantee: .*'marginal'"),
        (lambda card: card["conformal"].update(method="magic"), r"conformal\.method: "),
        (lambda card: card["ood"].update(false_alarms=0.0), r"ood\.false_alarms: "),
        (lambda card: card["drift"]["classes"].pop(), r".*do not fit the classes"),
        (lambda card: card["drift"]["entropy"].append(3), r".*do not add up to its rows"),
    ],
)
def test_a_card_that_cannot_be_used_is_refused_by_its_entry(finished_run: Path, change: Change, says: str) -> None:
    card = copy.deepcopy(read_student(finished_run)[0])
    assert max(row["coverage"] for row in card["abstention"]["table"][:-1]) < 1
    assert checked_card(card, "here") == card
    change(card)
    with pytest.raises(CheckpointError, match=rf"^here: is not a sound model card \({says}"):
        checked_card(card, "here")


def test_a_tables_card_has_as_many_numbers_as_its_columns_make(finished_run: Path) -> None:
    card = read_student(finished_run)[0]
    columns = [{"name": "ward", "kind": "categorical", "categories": ["a", "b"], "missing": True}]
    table = {"target": "y", "classes": card["classes"], "columns": columns}
    sound = {**card, "input": {"numbers": 3}, "table": table}
    assert checked_card(sound, "here") == sound
    with pytest.raises(CheckpointError, match=r"the columns of table make 3 numbers, not input\.numbers"):
        checked_card({**sound, "input": {"numbers": 4}}, "here")


# ---- the section `compare`


def test_the_files_own_sections_win_over_compare_and_overrides_over_both(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    values = {
        "client": {"epochs": 3},
        "compare": {"client": {"epochs": 9, "batch_size": 7}, "baseline": {"rate": 0.5, "momentum": 0.9}},
    }
    path.write_text(yaml.safe_dump(values))
    fedavg = ("method=fedavg",)
    plain = load_for_method(path, (), fedavg)
    assert (plain.client.epochs, plain.client.batch_size) == (3, 7)
    assert plain.values()["baseline"]["rate"] == 0.5
    changed = load_for_method(path, {"client.batch_size": 11, "baseline.rate": 0.25}, fedavg)
    assert (changed.client.epochs, changed.client.batch_size) == (3, 11)
    assert changed.values()["baseline"]["rate"] == 0.25
    whole = load_for_method(path, ["baseline={rate: 0.25}"], fedavg)  # a section that is given is the section
    assert (whole.values()["baseline"]["rate"], whole.values()["baseline"]["momentum"]) == (0.25, 0)
