"""The SGLD step, exactly; its statistics are in tests/statistical."""

import math

import pytest
import torch

from fedppd_ray.bayes.sgld import log_prior, sgld_step, step_rate
from fedppd_ray.seeding import generator_for


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = generator_for(0, "vectors")
    return torch.randn(50, generator=generator), torch.randn(50, generator=generator)


@pytest.mark.parametrize("prior", [0.0, 3.0])
def test_at_temperature_zero_it_is_gradient_descent_with_weight_decay(prior: float) -> None:
    theta, gradient = vectors()
    reference = torch.nn.Parameter(theta.clone())
    reference.grad = gradient.clone()
    torch.optim.SGD([reference], lr=0.2 / 2, weight_decay=prior / 30).step()
    generator = generator_for(0, "noise")
    sgld_step(theta, gradient, step=0.2, rows=30, temperature=0.0, prior_precision=prior, generator=generator)
    torch.testing.assert_close(theta, reference.detach())


def test_at_temperature_zero_nothing_is_drawn() -> None:
    theta, gradient = vectors()
    generator = generator_for(0, "noise")
    before = generator.get_state()
    sgld_step(theta, gradient, step=0.2, rows=30, temperature=0.0, prior_precision=1.0, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_a_step_is_drift_plus_scaled_noise_of_the_given_generator() -> None:
    theta, gradient = vectors()
    noise = torch.empty(50).normal_(generator=generator_for(0, "noise"))
    expected = theta - 0.3 / 2 * (gradient + 5.0 / 20 * theta) + math.sqrt(0.3 * 0.7 / 20) * noise
    sgld_step(
        theta, gradient, step=0.3, rows=20, temperature=0.7, prior_precision=5.0, generator=generator_for(0, "noise")
    )
    torch.testing.assert_close(theta, expected)


def test_the_gradient_is_left_alone() -> None:
    theta, gradient = vectors()
    kept = gradient.clone()
    sgld_step(theta, gradient, step=1.0, rows=2, temperature=1.0, prior_precision=1.0, generator=generator_for(0, "n"))
    assert torch.equal(gradient, kept)


def test_the_log_prior_is_a_centred_gaussians() -> None:
    theta, _ = vectors()
    normal = torch.distributions.Normal(0.0, 1 / math.sqrt(4.0))
    difference = normal.log_prob(theta).sum() - normal.log_prob(torch.zeros(50)).sum()
    assert log_prior(theta, 4.0) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.parametrize(("every", "gamma"), [(1, 0.5), (2, 0.85), (3, 0.8), (2, 1.0)])
def test_the_rate_is_torchs_step_lr(every: int, gamma: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.045)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, gamma)
    for epoch in range(10):
        assert step_rate(0.045, epoch, every, gamma) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        schedule.step()
