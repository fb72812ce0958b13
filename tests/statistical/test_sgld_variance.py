"""SGLD's stationary distribution on a quadratic is known exactly; so is the chain's spread in a client's round.

Every bound comes from a standard error: the sample variance of n independent normals has relative standard error
sqrt(2/n). Independent chains run side by side in one vector, so autocorrelation does not enter. Five standard
errors are passed by a correct sampler with probability 1 − 6e-7; seeds are fixed besides.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedppd_ray.bayes.sgld import sgld_step
from fedppd_ray.config.file import parse_config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods.fedppd import FedPPD
from fedppd_ray.seeding import generator_for

Step = Callable[..., None]
CHAINS = 40_000
ROWS = 50


def stationary(step: Step, precision: float, prior: float, temperature: float, rate: float) -> Tensor:
    """States of independent chains on the quadratic ½ precision θ² (full data) with prior ½ prior θ², after burn-in."""
    theta = torch.zeros(CHAINS, dtype=torch.float64)
    generator = generator_for(0, "statistical")
    contraction = 1 - rate / ROWS * (precision + prior) / 2
    # Until what is left of the start, relative to the variance, is far below the standard error.
    burn_in = math.ceil(math.log(1e-6) / (2 * math.log(abs(contraction))))
    for _ in range(burn_in):
        gradient = theta * precision / ROWS  # of the mean loss
        step(
            theta,
            gradient,
            step=rate,
            rows=ROWS,
            temperature=temperature,
            prior_precision=prior,
            generator=generator,
        )
    return theta


def is_exact(step: Step, precision: float, prior: float, temperature: float, rate: float) -> bool:
    """Variance T / (λ (1 − ελ/4)) and mean 0, each within five standard errors."""
    theta = stationary(step, precision, prior, temperature, rate)
    total, epsilon = precision + prior, rate / ROWS
    expected = temperature / (total * (1 - epsilon * total / 4))
    variance_is_right = abs(float(theta.square().mean()) / expected - 1) < 5 * math.sqrt(2 / CHAINS)
    mean_is_right = abs(float(theta.mean())) < 5 * math.sqrt(expected / CHAINS)
    return variance_is_right and mean_is_right


# (full-data precision, prior precision, temperature, rate): ελ from 0.2 to 1.5, so that the term (1 − ελ/4)
# counts for 5 to 38 per cent; five standard errors are 3.5.
CASES = [
    pytest.param(40.0, 10.0, 1.0, 0.5, id="Bayes posterior with a prior"),
    pytest.param(50.0, 0.0, 1.0, 1.0, id="no prior"),
    pytest.param(2.0, 48.0, 0.25, 1.0, id="mostly prior, cold"),
    pytest.param(40.0, 10.0, 4 / ROWS, 0.2, id="as cold as the authors ran it"),
    pytest.param(100.0, 50.0, 3.0, 0.5, id="hot, coarse steps"),
]


@pytest.mark.parametrize(("precision", "prior", "temperature", "rate"), CASES)
def test_the_stationary_variance_is_exact(precision: float, prior: float, temperature: float, rate: float) -> None:
    assert is_exact(sgld_step, precision, prior, temperature, rate)


def doubled_noise(theta: Tensor, gradient: Tensor, *, temperature: float, **rest: Any) -> None:
    sgld_step(theta, gradient, temperature=4 * temperature, **rest)


def noise_of_welling_and_teh_with_a_full_step(theta: Tensor, gradient: Tensor, *, step: float, **rest: Any) -> None:
    sgld_step(theta, gradient * 2, step=step, **{**rest, "prior_precision": 2 * rest["prior_precision"]})


def noise_without_the_rows(theta: Tensor, gradient: Tensor, *, temperature: float, rows: int, **rest: Any) -> None:
    sgld_step(theta, gradient, temperature=temperature * rows, rows=rows, **rest)


def forgotten_prior(theta: Tensor, gradient: Tensor, *, prior_precision: float, **rest: Any) -> None:
    sgld_step(theta, gradient, prior_precision=0.0 * prior_precision, **rest)


def prior_counted_twice(theta: Tensor, gradient: Tensor, *, prior_precision: float, **rest: Any) -> None:
    sgld_step(theta, gradient, prior_precision=2 * prior_precision, **rest)


def five_per_cent_warmer(theta: Tensor, gradient: Tensor, *, temperature: float, **rest: Any) -> None:
    sgld_step(theta, gradient, temperature=1.05 * temperature, **rest)


def biased_noise(theta: Tensor, gradient: Tensor, **rest: Any) -> None:
    sgld_step(theta, gradient, **rest)
    theta.add_(0.02)


@pytest.mark.parametrize(
    "mutant",
    [
        doubled_noise,
        noise_of_welling_and_teh_with_a_full_step,
        noise_without_the_rows,
        forgotten_prior,
        prior_counted_twice,
        five_per_cent_warmer,
        biased_noise,
    ],
)
def test_the_check_rejects_a_wrong_sampler(mutant: Step) -> None:
    assert not is_exact(mutant, 40.0, 10.0, 1.0, 0.5)


def test_coordinates_and_steps_are_independent() -> None:
    theta, generator = torch.zeros(CHAINS, dtype=torch.float64), generator_for(1, "statistical")
    settings: dict[str, Any] = {"step": 1.0, "rows": 1, "temperature": 1.0, "prior_precision": 0.0}
    sgld_step(theta, torch.zeros(CHAINS), generator=generator, **settings)
    first = theta.clone()
    sgld_step(theta, torch.zeros(CHAINS), generator=generator, **settings)
    second = theta - first
    bound = 5 / math.sqrt(CHAINS)
    assert abs(float((first * second).mean())) < bound
    assert abs(float((first[1:] * first[:-1]).mean())) < bound


# ---- the chain inside a client's round

CLIENT_ROWS = 36


def travelled(round_id: int = 1, **teacher: Any) -> tuple[float, int]:
    """Variance of θ_last − θ_start over the weights in a round where noise alone moves them, and their number."""
    client, distill_every = teacher.pop("client", {}), teacher.pop("distill_every", "epoch")
    settings = {"rate": 1e-9, "rate_gamma": 1.0, "send": "last", "prior_precision": 0.0, **teacher}
    config = parse_config(
        {
            "client": {"epochs": 3, "batch_size": 9, **client},
            "teacher": settings,
            "student": {"distill_every": distill_every},
        }
    )
    method = FedPPD(config)
    images = np.random.default_rng(0).integers(0, 256, (CLIENT_ROWS, 1, 28, 28)).astype(np.uint8)
    shard = ImageShard(images, np.arange(CLIENT_ROWS) % 10, config.dataset)
    state = GlobalState(round_id - 1, method.initial_models())
    sent = method.local_update("client-00", state, shard, lambda: False).models["teacher"]
    moved = sent.astype(np.float64) - state.models["teacher"]
    return float((moved**2).mean()), moved.size


@pytest.mark.parametrize("temperature", ["4e5/N", 1e5 / 9, "3e2*N"])
@pytest.mark.parametrize("distill_every", ["epoch", "iteration"])
def test_a_clients_chain_takes_one_step_a_batch_at_the_clients_temperature(
    temperature: float | str, distill_every: str
) -> None:
    numeric = {"4e5/N": 4e5 / CLIENT_ROWS, "3e2*N": 3e2 * CLIENT_ROWS}.get(str(temperature), temperature)
    variance, weights = travelled(temperature=temperature, distill_every=distill_every)
    steps = 3 * 4  # epochs × batches
    expected = steps * 1e-9 * float(numeric) / CLIENT_ROWS
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / weights))


def test_the_rate_follows_step_lr_within_a_round_and_decays_from_round_to_round() -> None:
    variance, weights = travelled(3, temperature=1e6, rate_step=1, rate_gamma=0.5, client={"rate_decay": 0.8})
    expected = 4 * (1 + 0.5 + 0.25) * 0.8**2 * 1e-9 * 1e6 / CLIENT_ROWS
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / weights))


def test_step_lr_starts_anew_in_every_round() -> None:
    first, weights = travelled(1, temperature=1e6, rate_step=2, rate_gamma=0.5)
    later, _ = travelled(7, temperature=1e6, rate_step=2, rate_gamma=0.5)
    expected = 4 * (1 + 1 + 0.5) * 1e-9 * 1e6 / CLIENT_ROWS
    assert [first, later] == pytest.approx([expected] * 2, rel=5 * math.sqrt(2 / weights))
