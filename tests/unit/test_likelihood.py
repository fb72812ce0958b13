"""The label-shift likelihood: by its equation, in the teacher, in θ_MAP's density and in the baselines' loss."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.bayes.likelihood import label_shift, log_shares, shifted
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method

ROWS, CLASSES = 24, 10


def config_of(**changes: Any) -> Config:
    """One epoch of one batch on CIFAR-10's networks, which have no dropout: a step is an equation."""
    client = {"epochs": 1, "batch_size": ROWS, **changes.pop("client", {})}
    return parse_config({"data": {"name": "cifar10"}, "evaluation": {"ood": None}, "client": client, **changes})


@pytest.fixture(scope="module")
def shard() -> ImageShard:
    """A skewed client: class 0 nine times, class 1 eight times, some others, three of them never."""
    generator = np.random.default_rng(2)
    labels = np.array([0] * 9 + [1] * 8 + [2, 3, 4, 5, 6, 6, 6], np.int64)
    images = generator.integers(0, 256, (ROWS, 3, 32, 32)).astype(np.uint8)
    return ImageShard(images, labels, config_of().dataset)


def naive_log_likelihood(logits: list[float], label: int, counts: list[int], strength: float) -> float:
    """f_y + τ log π(y) − log Σ_c exp(f_c + τ log π(c)), π(c) = (n_c + 1)/(N + C), in plain Python."""
    shares = [(count + 1) / (sum(counts) + len(counts)) for count in counts]
    adjusted = [value + strength * math.log(share) for value, share in zip(logits, shares, strict=True)]
    return adjusted[label] - math.log(sum(math.exp(value) for value in adjusted))


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_the_shifted_softmax_is_the_equation(strength: float) -> None:
    labels = torch.tensor([0, 0, 0, 2, 2, 3])
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    shift = label_shift(labels, 5, strength)
    ours = torch.log_softmax(shifted(logits, shift), 1).gather(1, labels[:, None])[:, 0]
    naive = [
        naive_log_likelihood(logits[row].tolist(), int(label), [3, 0, 2, 1, 0], strength)
        for row, label in enumerate(labels)
    ]
    torch.testing.assert_close(ours, torch.tensor(naive), atol=1e-6, rtol=0)


def test_shares_are_a_distribution_without_zeros() -> None:
    shares = log_shares(torch.tensor([1, 1, 1]), 4).exp()
    torch.testing.assert_close(shares, torch.tensor([1, 4, 1, 1], dtype=torch.float64) / 7)


def test_no_strength_is_no_shift_and_balanced_classes_shift_nothing() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    assert label_shift(torch.tensor([0, 0, 1]), 3, 0.0) is None
    assert shifted(logits, None) is logits
    balanced = shifted(logits, label_shift(torch.tensor([0, 1, 2]), 3, 1.0))
    torch.testing.assert_close(torch.softmax(balanced, 1), torch.softmax(logits, 1))


def naive_loss(network: Any, shard: ImageShard, strength: float) -> torch.Tensor:
    """The mean negative of the equation over a shard, differentiable."""
    assert shard.labels is not None
    counts = torch.bincount(shard.labels, minlength=CLASSES)
    shares = (counts + 1) / (ROWS + CLASSES)
    adjusted = network.module(shard.inputs(torch.arange(ROWS))) + strength * shares.log()
    own = adjusted[torch.arange(ROWS), shard.labels]
    return (torch.logsumexp(adjusted, 1) - own).mean()


def test_the_teacher_descends_the_shifted_likelihood_and_its_density_is_by_it(shard: ImageShard) -> None:
    """One SGLD step at T = 0: θ − (η/2)(∇ mean loss + (prior/N) θ); the density of what is sent has τ too."""
    teacher = {"rate": 0.2, "temperature": 0, "prior_precision": 0.5, "send": "map"}
    method: Any = build_method(config_of(client={"label_shift": 1.0}, teacher=teacher))
    state = GlobalState(0, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False)
    network = method.networks_by_role["teacher"]
    network.load(state.models["teacher"])
    gradient = network.backward(naive_loss(network, shard, 1.0)).numpy().copy()
    start = state.models["teacher"]
    expected = start - 0.1 * (gradient + 0.5 / ROWS * start)
    np.testing.assert_allclose(result.models["teacher"], expected, atol=1e-6)

    network.load(result.models["teacher"])
    prior = -0.25 * float((result.models["teacher"].astype(np.float64) ** 2).sum())
    density = prior / ROWS - float(naive_loss(network, shard, 1.0).detach())
    assert result.metrics["log_posterior_per_row"] == pytest.approx(density, rel=1e-5)


def test_a_baseline_descends_the_shifted_likelihood(shard: ImageShard) -> None:
    config = config_of(method="fedavg", client={"label_shift": 0.5}, baseline={"rate": 0.1, "weight_decay": 0})
    method: Any = build_method(config)
    state = GlobalState(0, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False)
    method.network.load(state.models["model"])
    gradient = method.network.backward(naive_loss(method.network, shard, 0.5)).numpy()
    np.testing.assert_allclose(result.models["model"], state.models["model"] - 0.1 * gradient, atol=1e-6)


@pytest.mark.parametrize("method", ["fedppd", "fedavg"])
def test_strength_zero_is_todays_bits_and_one_is_not(method: str, shard: ImageShard) -> None:
    def sent(**client: float) -> dict[str, Any]:
        made = build_method(config_of(method=method, client=client))
        return dict(made.local_update("client-00", GlobalState(0, made.initial_models()), shard, lambda: False).models)

    plain, zero, one = sent(), sent(label_shift=0.0), sent(label_shift=1.0)
    assert all(np.array_equal(plain[role], zero[role]) for role in plain)
    assert not any(np.array_equal(plain[role], one[role]) for role in plain)
