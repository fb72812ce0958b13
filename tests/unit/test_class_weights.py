"""`client.class_weights: balanced` by its equation: the teacher, θ_MAP's density, the student's label term."""

from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.bayes.likelihood import balanced_weights, label_loss
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method

ROWS, CLASSES = 24, 10
LABELS = [0] * 9 + [1] * 8 + [2, 3, 4, 5, 6, 6, 6]  # seven classes held, three not


def config_of(**changes: Any) -> Config:
    """One epoch of one batch on CIFAR-10's networks, which have no dropout: a step is an equation."""
    client = {"epochs": 1, "batch_size": ROWS, **changes.pop("client", {})}
    return parse_config({"data": {"name": "cifar10"}, "evaluation": {"ood": None}, "client": client, **changes})


@pytest.fixture(scope="module")
def shard() -> ImageShard:
    images = np.random.default_rng(2).integers(0, 256, (ROWS, 3, 32, 32)).astype(np.uint8)
    return ImageShard(images, np.array(LABELS, np.int64), config_of().dataset)


def naive_weights() -> list[float]:
    """N/(C_k n_c) of each row, in plain Python."""
    held = len(set(LABELS))
    return [len(LABELS) / (held * LABELS.count(label)) for label in LABELS]


def naive_loss(network: Any, shard: ImageShard) -> torch.Tensor:
    """(1/N) Σ w_i (log Σ_c exp f_c − f_y), differentiable."""
    logits = network.module(shard.inputs(torch.arange(ROWS)))
    own = logits[torch.arange(ROWS), torch.tensor(LABELS)]
    return (torch.tensor(naive_weights()) * (torch.logsumexp(logits, 1) - own)).sum() / ROWS


def test_every_held_class_weighs_the_same_and_all_rows_as_many_as_there_are() -> None:
    weights = balanced_weights(torch.tensor(LABELS), CLASSES)
    by_row = weights[torch.tensor(LABELS)]
    np.testing.assert_allclose(by_row.numpy(), naive_weights(), rtol=1e-6)
    assert float(by_row.sum()) == pytest.approx(ROWS)
    assert weights[7:].tolist() == [0, 0, 0]
    for label in set(LABELS):
        assert float(by_row[torch.tensor(LABELS) == label].sum()) == pytest.approx(ROWS / 7)


def test_batches_add_up_to_the_loss_of_all_rows() -> None:
    """Divided by a batch's rows, not by its weights: the mean over equal batches is that over all rows."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(ROWS, CLASSES, generator=generator), torch.tensor(LABELS)
    weights = balanced_weights(labels, CLASSES)
    parts = [label_loss(logits[at : at + 6], labels[at : at + 6], None, weights) for at in range(0, ROWS, 6)]
    torch.testing.assert_close(torch.stack(parts).mean(), label_loss(logits, labels, None, weights))


def test_balanced_classes_have_weight_one() -> None:
    assert balanced_weights(torch.tensor([0, 1, 1, 0]), 3).tolist() == [1, 1, 0]


def test_the_teacher_descends_the_weighted_likelihood_and_its_density_is_by_it(shard: ImageShard) -> None:
    teacher = {"rate": 0.2, "temperature": 0, "prior_precision": 0.5, "send": "map"}
    method: Any = build_method(config_of(client={"class_weights": "balanced"}, teacher=teacher))
    state = GlobalState(0, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False)
    network = method.networks_by_role["teacher"]
    start = state.models["teacher"]
    network.load(start)
    gradient = network.backward(naive_loss(network, shard)).numpy().copy()
    np.testing.assert_allclose(result.models["teacher"], start - 0.1 * (gradient + 0.5 / ROWS * start), atol=1e-6)
    network.load(result.models["teacher"])
    prior = -0.25 * float((result.models["teacher"].astype(np.float64) ** 2).sum())
    density = prior / ROWS - float(naive_loss(network, shard).detach())
    assert result.metrics["log_posterior_per_row"] == pytest.approx(density, rel=1e-5)


def test_the_student_weighs_its_labels_and_not_what_it_distils(shard: ImageShard) -> None:
    """Still teacher: w ← w − β ((1 − λ) ∇ distillation + λ ∇ weighted label loss)."""
    teacher = {"rate": 1e-12, "temperature": 0, "prior_precision": 0}
    student = {"rate": 0.1, "weight_decay": 0, "input_noise": 0, "label_weight": 0.25}
    config = config_of(client={"class_weights": "balanced"}, teacher=teacher, student=student)
    method: Any = build_method(config)
    state = GlobalState(0, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False)
    teacher_net, student_net = (method.networks_by_role[role] for role in ("teacher", "student"))
    teacher_net.load(result.models["teacher"])
    student_net.load(state.models["student"])
    teacher_net.module.eval()
    student_net.module.train()
    inputs = shard.inputs(torch.arange(ROWS))
    with torch.no_grad():
        targets = torch.softmax(teacher_net.module(inputs), 1)
    logs = torch.log_softmax(student_net.module(inputs), 1)
    distilled = -(targets * logs).sum() / ROWS
    weighted = -(torch.tensor(naive_weights()) * logs[torch.arange(ROWS), torch.tensor(LABELS)]).sum() / ROWS
    gradient = student_net.backward(0.75 * distilled + 0.25 * weighted).numpy()
    np.testing.assert_allclose(result.models["student"], state.models["student"] - 0.1 * gradient, atol=1e-6)


def test_a_baseline_descends_the_weighted_likelihood(shard: ImageShard) -> None:
    config = config_of(method="fedavg", client={"class_weights": "balanced"}, baseline={"rate": 0.1, "weight_decay": 0})
    method: Any = build_method(config)
    state = GlobalState(0, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False)
    method.network.load(state.models["model"])
    gradient = method.network.backward(naive_loss(method.network, shard)).numpy()
    np.testing.assert_allclose(result.models["model"], state.models["model"] - 0.1 * gradient, atol=1e-6)


@pytest.mark.parametrize("method", ["fedppd", "fedavg"])
def test_none_is_todays_bits_and_balanced_is_not(method: str, shard: ImageShard) -> None:
    def sent(**client: str) -> dict[str, Any]:
        made = build_method(config_of(method=method, client=client))
        return dict(made.local_update("client-00", GlobalState(0, made.initial_models()), shard, lambda: False).models)

    plain, none, balanced = sent(), sent(class_weights="none"), sent(class_weights="balanced")
    assert all(np.array_equal(plain[role], none[role]) for role in plain)
    assert not any(np.array_equal(plain[role], balanced[role]) for role in plain)


def test_weights_and_shift_for_the_same_skew_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"client\.class_weights: client\.label_shift makes up for .*remove one"):
        config_of(client={"class_weights": "balanced", "label_shift": 1.0})
