"""Scores of log-probabilities, logits and features: what they are, who has them, and how they are served."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.config.nouns import SCORES
from fedppd_ray.config.schema import Config
from fedppd_ray.inference.abstention import abstention_card, score_of, temperature_of
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor, outputs_of
from fedppd_ray.inference.scores import Outputs, Score, all_scores, score_named
from fedppd_ray.inference.student import Student, describe_predictions
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import build_network, initialise
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.store import RunStore

LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [-3.0, 8.0, 1.0]])


def outputs() -> Outputs:
    log_p = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))
    return Outputs(log_p, LOGITS, np.array([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]], np.float32))


@pytest.fixture(scope="module")
def network() -> FlatModel:
    model = FlatModel(build_network("mnist_student", (1, 28, 28), 10))
    initialise(model.module, torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(7, 1, 28, 28, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_probability", [1 - math.exp(2) / (math.exp(2) + 1 + math.exp(-1)), 2 / 3, None]),
        ("energy", [-math.log(math.exp(2) + 1 + math.exp(-1)), -(0.5 + math.log(3)), None]),
        ("max_logit", [-2, -0.5, -8]),
        ("feature_norm", [-5, -1, -10]),
    ],
)
def test_a_score_is_what_its_name_says(name: str, expected: list[float | None]) -> None:
    found = score_named(name).of(outputs())
    for value, wanted in zip(found, expected, strict=True):
        assert wanted is None or value == pytest.approx(wanted, abs=1e-12)


def test_every_score_is_higher_for_the_vague_row_than_for_the_sure_one() -> None:
    assert next(score.name for score in all_scores()) == "entropy"
    for score in all_scores():
        values = score.of(outputs())
        assert values[1] > values[0] > values[2], score.name


def test_energy_of_large_logits_is_finite() -> None:
    assert score_named("energy").of(Outputs(LOGITS, 1000 * LOGITS))[2] == pytest.approx(-8000)


def test_who_has_only_probabilities_has_no_score_of_logits_and_says_so() -> None:
    ensemble = Outputs(outputs().log_probabilities)
    assert [score.name for score in all_scores() if score.fits(ensemble)] == ["entropy", "max_probability"]
    with pytest.raises(ValueError, match="score 'energy' needs logits, which only a single network has"):
        score_named("energy").of(ensemble)


def test_an_outside_score_is_a_name_and_a_function_of_log_probabilities() -> None:
    margin = Score("margin", lambda log_p: -np.diff(np.sort(np.exp(log_p), axis=1)[:, -2:], axis=1)[:, 0])
    assert margin(outputs().log_probabilities)[1] == pytest.approx(0)
    assert np.array_equal(margin.of(outputs()), margin(outputs().log_probabilities))
    card = abstention_card(outputs().log_probabilities, np.array([0, 1, 2]), 1.0, margin)
    json.dumps(card, allow_nan=False)  # no limit is known: still a threshold that JSON can hold
    assert (margin.of(outputs()) <= card["threshold"]).all()


def test_one_pass_gives_the_same_bits_with_and_without_logits_and_features(
    network: FlatModel, inputs: torch.Tensor
) -> None:
    predict, passes = network_predictor(network), []
    handle = network.module.register_forward_hook(lambda *_: passes.append(1))
    seen = predict.outputs(inputs)
    handle.remove()
    assert len(passes) == 1
    assert np.array_equal(seen.log_probabilities, predict(inputs).numpy())
    assert seen.logits is not None
    assert seen.features is not None
    last = network.module.out
    rebuilt = torch.from_numpy(seen.features) @ last.weight.T + last.bias
    np.testing.assert_allclose(rebuilt.detach().numpy(), seen.logits, atol=1e-5)


def test_a_network_without_a_linear_layer_has_logits_and_no_features() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    seen = network_predictor(FlatModel(module)).outputs(torch.zeros(2, 1, 5, 5))
    assert seen.features is None
    assert seen.logits is not None


def test_a_linear_layer_that_is_not_the_last_is_no_source_of_features() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 6), torch.nn.Unflatten(1, (6, 1)))
    module.append(torch.nn.Conv1d(6, 4, 1)).append(torch.nn.Flatten())
    assert network_predictor(FlatModel(module)).outputs(torch.zeros(2, 1, 3, 3)).features is None


def test_a_function_is_a_predictor_too(inputs: torch.Tensor, network: FlatModel) -> None:
    predict = network_predictor(network)
    seen = outputs_of(lambda batch: predict(batch), inputs)
    assert seen.logits is None
    assert np.array_equal(seen.log_probabilities, predict(inputs).numpy())


def test_features_of_two_threads_do_not_mix(network: FlatModel) -> None:
    predict = network_predictor(network)
    batches = [torch.full((1 + number % 2, 1, 28, 28), float(number)) for number in range(2)]
    alone = [predict.outputs(batch).features for batch in batches]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(150):
            found = predict.outputs(batches[number]).features
            if found is None or not np.array_equal(found, alone[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- served


@pytest.fixture(scope="module", params=["energy", "feature_norm", "max_probability"])
def run(
    request: pytest.FixtureRequest,
    tiny: Callable[..., Config],
    train_run: Callable[..., object],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("scored") / "run"
    config = tiny(method="fedavg", federation={"rounds": 1}, evaluation={"score": request.param, "ood": "noise"})
    train_run(config, folder)
    return folder


def test_the_card_names_the_score_and_its_threshold_answers_the_asked_share(run: Path) -> None:
    config, (card, model) = RunStore(run).config(), read_student(run)
    score = score_named(config.evaluation.score)
    assert card["score"] == score_of(card) == card["abstention"]["score"] == score.name
    student, images = Student(card, model), HeldOut(config).images("calibration")
    answers = student.predict(np.asarray(images))
    assert sum(not answer["abstain"] for answer in answers) == math.ceil(0.95 * (len(images) + 1))
    seen = HeldOut(config).outputs(network_predictor(model), "calibration")
    if score.needs != "log_probabilities":  # not touched by the temperature
        assert [answer["abstain"] for answer in answers] == (score.of(seen) > card["abstention"]["threshold"]).tolist()


def test_serving_is_one_forward_pass_and_rows_can_be_cut_and_joined(run: Path) -> None:
    config, (card, model) = RunStore(run).config(), read_student(run)
    student, rows = Student(card, model), np.asarray(HeldOut(config).images("test")[:9])
    passes: list[int] = []
    handle = model.module.register_forward_hook(lambda *_: passes.append(1))
    evidence = student.evidence(rows)
    handle.remove()
    assert len(passes) == 1
    whole = describe_predictions(card, evidence)
    assert describe_predictions(card, evidence[:4]) + describe_predictions(card, evidence[4:]) == whole
    assert student.log_probabilities(rows).shape == (9, 10)
    sums = np.exp(student.log_probabilities(rows)).sum(axis=1)
    np.testing.assert_allclose(sums, 1)


def test_a_card_of_an_earlier_version_has_temperature_1_and_the_entropy() -> None:
    card: dict[str, Any] = {"abstention": None}
    assert (temperature_of(card), score_of(card)) == (1.0, "entropy")
    assert SCORES.brought_by("energy") == "fedppd_ray.inference.scores"
