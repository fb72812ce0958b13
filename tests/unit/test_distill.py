"""The student's loss and step."""

import copy

import pytest
import torch
from torch import nn

from fedppd_ray.bayes.distill import noisy, soft_cross_entropy, student_step
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.seeding import generator_for


def problem() -> tuple[FlatModel, torch.Tensor, torch.Tensor]:
    generator = generator_for(0, "problem")
    model = FlatModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    inputs = torch.randn(8, 4, generator=generator)
    targets = torch.softmax(torch.randn(8, 3, generator=generator), 1)
    with torch.no_grad():
        model.vector.normal_(generator=generator)
    return model, inputs, targets


def test_soft_cross_entropy_is_torchs_with_probabilities() -> None:
    model, inputs, targets = problem()
    logits = model.module(inputs)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), nn.functional.cross_entropy(logits, targets))


def test_soft_cross_entropy_with_certain_targets_is_the_ordinary_one() -> None:
    model, inputs, _ = problem()
    labels = torch.arange(8) % 3
    logits = model.module(inputs)
    expected = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(soft_cross_entropy(logits, nn.functional.one_hot(labels, 3).float()), expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_student_step_is_plain_sgd_with_weight_decay(weight_decay: float) -> None:
    model, inputs, targets = problem()
    reference = copy.deepcopy(nn.Sequential(*model.module))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3, weight_decay=weight_decay)
    for _ in range(3):
        optimizer.zero_grad()
        expected_loss = nn.functional.cross_entropy(reference(inputs), targets)
        expected_loss.backward()
        optimizer.step()
        loss = student_step(model, inputs, targets, 0.3, weight_decay)
        assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-6)
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(model.weights, expected)


def test_many_steps_bring_the_student_to_its_targets() -> None:
    model, inputs, targets = problem()
    floor = float(-(targets * targets.log()).sum(1).mean())
    first = student_step(model, inputs, targets, 0.5, 0.0)
    for _ in range(300):
        last = student_step(model, inputs, targets, 0.5, 0.0)
    assert last - floor < 0.05 * (first - floor)


def test_noise_has_the_given_spread_and_no_noise_draws_nothing() -> None:
    inputs = torch.zeros(100, 1000)
    added = noisy(inputs, 0.25, generator_for(0, "noise"))
    assert float(added.std()) == pytest.approx(0.25, rel=5 / (2 * 100_000) ** 0.5)
    assert abs(float(added.mean())) < 5 * 0.25 / 100_000**0.5
    generator = generator_for(0, "noise")
    before = generator.get_state()
    assert torch.equal(noisy(inputs, 0.0, generator), inputs)
    assert torch.equal(generator.get_state(), before)
    assert not inputs.any()


@pytest.mark.parametrize("channels", [1, 3])
def test_noisy_inputs_keep_their_channels_last_and_every_number_has_its_own_noise(channels: int) -> None:
    inputs = torch.randn(4, 6, 6, channels, generator=generator_for(0, "images")).permute(0, 3, 1, 2)
    kept = inputs.clone()
    added = noisy(inputs, 0.1, generator_for(0, "noise"))
    assert added.stride() == inputs.stride()
    assert torch.equal(inputs, kept)
    assert len((added - inputs).unique()) > 0.9 * inputs.numel()
