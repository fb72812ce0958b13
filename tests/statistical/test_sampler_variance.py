"""Every sampler's exact variance on a quadratic, as a discrete chain: not its limit for small steps.

Bounds as in test_sgld_variance.py: n independent chains side by side, five standard errors sqrt(2/n) on a variance
and sqrt(variance/n) on a mean. Each check is also run on samplers that are wrong, doubled noise among them, and
must reject them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedppd_ray.bayes.samplers import PSGLD, SGHMC, Sampler, Schedule, Target
from fedppd_ray.config.file import parse_config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods.fedppd import FedPPD
from fedppd_ray.methods.teacher import TeacherConfig, build_sampler
from fedppd_ray.seeding import generator_for

CHAINS = 40_000
ROWS = 50
Build = Callable[..., Sampler]


def agrees(states: Tensor, variance: float, mean: float = 0.0) -> bool:
    """The states' mean and their variance around it are those expected, each within five standard errors."""
    count = states.numel()
    spread = float((states - mean).square().mean())
    variance_is_right = abs(spread / variance - 1) < 5 * math.sqrt(2 / count)
    return variance_is_right and abs(float(states.mean()) - mean) < 5 * math.sqrt(variance / count)


def run(
    sampler: Sampler,
    theta: Tensor,
    precision: float | Tensor,
    *,
    epoch: int,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Steps on the quadratic ½ precision θ² of the full data; the sampler adds the prior's part."""
    for _ in range(steps):
        sampler.step(theta, theta * precision / ROWS, epoch=epoch, generator=generator)


def burn_in(contraction: float) -> int:
    """Steps until what is left of the start, relative to the variance, is far below the standard error."""
    return math.ceil(math.log(1e-6) / (2 * math.log(contraction)))


def constant(rate: float, exploration: int = 0) -> Schedule:
    return Schedule(lambda _epoch: rate, exploration)


# ---- SGHMC


def sghmc_recursion(total: float, temperature: float, rate: float, friction: float) -> tuple[np.ndarray, np.ndarray]:
    """(θ, v) ← A (θ, v) + b ξ: with h = ελ, θ' = θ + v' and v' = (1 − a) v − h θ + sqrt(2aεT) ξ."""
    epsilon = rate / ROWS
    step = epsilon * total
    matrix = np.array([[1 - step, 1 - friction], [-step, 1 - friction]])
    return matrix, math.sqrt(2 * friction * epsilon * temperature) * np.ones(2)


def lyapunov(matrix: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The covariance S = A S Aᵀ + b bᵀ of the linear recursion, from vec(S) = (I − A⊗A)⁻¹ vec(b bᵀ)."""
    size = len(matrix)
    solved = np.linalg.solve(np.eye(size**2) - np.kron(matrix, matrix), np.outer(noise, noise).reshape(-1))
    return solved.reshape(size, size)


def sghmc_is_exact(
    build: Build, precision: float, prior: float, temperature: float, rate: float, friction: float
) -> bool:
    """Variance of θ, and of the last increment v, against the recursion's Lyapunov solution."""
    matrix, noise = sghmc_recursion(precision + prior, temperature, rate, friction)
    covariance = lyapunov(matrix, noise)
    sampler = build(Target(ROWS, temperature, prior), constant(rate), friction)
    theta, generator = torch.zeros(CHAINS, dtype=torch.float64), generator_for(0, "sghmc")
    steps = burn_in(max(abs(np.linalg.eigvals(matrix))))
    run(sampler, theta, precision, epoch=0, steps=steps, generator=generator)
    before = theta.clone()
    run(sampler, theta, precision, epoch=0, steps=1, generator=generator)
    return agrees(theta, covariance[0, 0]) and agrees(theta - before, covariance[1, 1])


# (full-data precision, prior precision, temperature, rate, friction): ελ from 0.3 to 1.5.
SGHMC_CASES = [
    pytest.param(40.0, 10.0, 1.0, 0.5, 0.1, id="Bayes posterior with a prior"),
    pytest.param(50.0, 0.0, 1.0, 1.5, 0.3, id="no prior, coarse steps"),
    pytest.param(5.0, 45.0, 4 / ROWS, 0.3, 0.1, id="mostly prior, as cold as the authors ran SGLD"),
    pytest.param(50.0, 0.0, 2.0, 0.5, 1.0, id="full friction: SGLD"),
]


@pytest.mark.parametrize(("precision", "prior", "temperature", "rate", "friction"), SGHMC_CASES)
def test_the_stationary_variance_of_sghmc_is_exact(
    precision: float, prior: float, temperature: float, rate: float, friction: float
) -> None:
    assert sghmc_is_exact(SGHMC, precision, prior, temperature, rate, friction)


@pytest.mark.parametrize(("precision", "prior", "temperature", "rate", "friction"), SGHMC_CASES)
def test_the_closed_form_of_sghmcs_variance_solves_the_recursion(
    precision: float, prior: float, temperature: float, rate: float, friction: float
) -> None:
    """Stationarity of θ' = θ + v' says E v² = 2 (h E θ² − (1 − a) E θv) and E θv = h E θ² / (2 − a).

    Put into E v² = (1 − a)² E v² − 2 (1 − a) h E θv + h² E θ² + 2aεT, that gives
    E θ² = T / (λ (1 − ελ / (2 (2 − a)))).
    """
    total = precision + prior
    covariance = lyapunov(*sghmc_recursion(total, temperature, rate, friction))
    closed = temperature / (total * (1 - rate / ROWS * total / (2 * (2 - friction))))
    assert covariance[0, 0] == pytest.approx(closed, rel=1e-10)


def warmer(factor: float) -> Callable[[Target], Target]:
    return lambda target: Target(target.rows, factor * target.temperature, target.prior_precision)


def without_prior(target: Target) -> Target:
    return Target(target.rows, target.temperature, 0.0)


DOUBLED_NOISE, FIVE_PER_CENT_WARMER = warmer(4.0), warmer(1.05)
WRONG_TARGETS = [
    pytest.param(DOUBLED_NOISE, id="doubled noise"),
    pytest.param(FIVE_PER_CENT_WARMER, id="five per cent warmer"),
    pytest.param(without_prior, id="forgotten prior"),
]


@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_the_check_of_sghmc_rejects_a_wrong_sampler(wrong: Callable[[Target], Target]) -> None:
    def build(target: Target, *rest: Any) -> SGHMC:
        return SGHMC(wrong(target), *rest)

    assert not sghmc_is_exact(build, 40.0, 10.0, 1.0, 0.5, 0.1)


def test_the_check_of_sghmc_rejects_another_friction() -> None:
    def build(target: Target, schedule: Schedule, friction: float) -> SGHMC:
        return SGHMC(target, schedule, friction + 0.5)

    assert not sghmc_is_exact(build, 40.0, 10.0, 1.0, 0.5, 0.1)


# ---- pSGLD

GROUPS = torch.tensor([10.0, 30.0, 60.0, 100.0], dtype=torch.float64)  # full-data precisions, 40 000 chains each
EPSILON = 0.2


def psgld_is_exact(build: Build, prior: float, temperature: float, rate: float) -> bool:
    """One noiseless step from θ = 1 sets G = 1/(e + λ/mean λ) in closed form; then the chain samples with it."""
    precision = GROUPS.repeat_interleave(CHAINS)
    sampler = build(Target(ROWS, temperature, prior), constant(rate, exploration=1), 0.99, EPSILON)
    theta, generator = torch.ones_like(precision), generator_for(0, "psgld")
    run(sampler, theta, precision, epoch=0, steps=1, generator=generator)
    scale = 1 / (EPSILON + GROUPS / GROUPS.mean())
    pull = rate / ROWS * scale * (GROUPS + prior)  # εGλ
    steps = burn_in(float((1 - pull / 2).abs().max()))
    run(sampler, theta, precision, epoch=1, steps=steps, generator=generator)
    expected = temperature / ((GROUPS + prior) * (1 - pull / 4))
    return all(agrees(part, float(variance)) for part, variance in zip(theta.chunk(4), expected, strict=True))


# (prior precision, temperature, rate): εGλ from 0.1 to 1.8.
PSGLD_CASES = [
    pytest.param(5.0, 1.0, 0.5, id="Bayes posterior with a prior"),
    pytest.param(0.0, 1.0, 1.0, id="no prior"),
    pytest.param(5.0, 4 / ROWS, 1.0, id="as cold as the authors ran SGLD"),
    pytest.param(20.0, 3.0, 0.75, id="hot"),
]


@pytest.mark.parametrize(("prior", "temperature", "rate"), PSGLD_CASES)
def test_the_stationary_variance_of_psgld_is_exact_in_every_dimension(
    prior: float, temperature: float, rate: float
) -> None:
    assert psgld_is_exact(PSGLD, prior, temperature, rate)


@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_the_check_of_psgld_rejects_a_wrong_sampler(wrong: Callable[[Target], Target]) -> None:
    def build(target: Target, *rest: Any) -> PSGLD:
        return PSGLD(wrong(target), *rest)

    assert not psgld_is_exact(build, 5.0, 1.0, 0.5)


class NoiseWithoutPreconditioner(PSGLD):
    """Preconditions the drift but not the noise: the temperature is then T/G."""

    def step(self, theta: Tensor, gradient: Tensor, *, epoch: int, generator: torch.Generator) -> None:
        before = theta.clone()
        cold = Target(self._target.rows, 0.0, self._target.prior_precision)
        warm, self._target = self._target, cold
        super().step(theta, gradient, epoch=epoch, generator=generator)
        self._target = warm
        if self.schedule.samples(epoch):
            noise = torch.empty_like(before).normal_(generator=generator)
            theta.add_(noise, alpha=math.sqrt(self.schedule.rate(epoch) * warm.temperature / warm.rows))


def test_the_check_of_psgld_rejects_noise_that_is_not_preconditioned() -> None:
    assert not psgld_is_exact(NoiseWithoutPreconditioner, 5.0, 1.0, 0.5)


# ---- cyclical SGLD


def cyclical_is_exact(build: Build, epochs: int, sampling: int, temperature: float) -> bool:
    """Mean and variance of the chain at the end of each epoch, by their exact recursions.

    From θ = 1, with ε_t = η_t/N: m_{t+1} = (1 − ε_t λ/2) m_t throughout; v stays 0 while the cycle explores and then
    v_{t+1} = (1 − ε_t λ/2)² v_t + ε_t T. ε_t λ starts at 0.2, so the chain remembers its schedule.
    """
    precision, prior, rate, steps = 16.0, 4.0, 0.5, 5
    sampler = build(Target(ROWS, temperature, prior), rate, epochs, sampling)
    theta, generator = torch.ones(CHAINS, dtype=torch.float64), generator_for(0, "cyclical")
    mean, variance, right = 1.0, 0.0, True
    for epoch in range(epochs):
        run(sampler, theta, precision, epoch=epoch, steps=steps, generator=generator)
        epsilon = rate / 2 * (1 + math.cos(math.pi * epoch / epochs)) / ROWS
        contraction = 1 - epsilon * (precision + prior) / 2
        for _ in range(steps):
            mean *= contraction
            variance = contraction**2 * variance + (epsilon * temperature if epoch >= epochs - sampling else 0.0)
        if variance == 0:
            right = right and bool(torch.allclose(theta, torch.full_like(theta, mean), rtol=1e-12))
        else:
            right = right and agrees(theta, variance, mean)
    return right


def cyclical(target: Target, rate: float, epochs: int, sampling: int, name: str = "cyclical") -> Sampler:
    settings = TeacherConfig.model_validate(
        {
            "sampler": name,
            "sampling_epochs": sampling,
            "temperature": target.temperature,
            "prior_precision": target.prior_precision,
        }
    )
    return build_sampler(settings, rate=rate, epochs=epochs, rows=target.rows)


@pytest.mark.parametrize(("epochs", "sampling", "temperature"), [(6, 3, 1.0), (10, 4, 4 / ROWS), (4, 1, 2.0)])
def test_the_variance_of_a_cycle_is_exact_epoch_by_epoch(epochs: int, sampling: int, temperature: float) -> None:
    assert cyclical_is_exact(cyclical, epochs, sampling, temperature)


@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_the_check_of_cycles_rejects_a_wrong_sampler(wrong: Callable[[Target], Target]) -> None:
    assert not cyclical_is_exact(lambda target, *rest: cyclical(wrong(target), *rest), 6, 3, 1.0)


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_check_of_cycles_rejects_noise_from_another_epoch_on(shift: int) -> None:
    def build(target: Target, rate: float, epochs: int, sampling: int) -> Sampler:
        return cyclical(target, rate, epochs, sampling + shift)

    assert not cyclical_is_exact(build, 6, 3, 1.0)


def test_the_check_of_cycles_rejects_another_schedule() -> None:
    assert not cyclical_is_exact(lambda *rest: cyclical(*rest, name="sgld"), 6, 6, 1.0)


# ---- the chains inside a client's round

CLIENT_ROWS, BATCHES, EPOCHS = 36, 4, 3


def travelled(**teacher: Any) -> tuple[float, int]:
    """Variance of θ_last − θ_start over the weights in a round where noise alone moves them, and their number."""
    settings = {"rate": 1e-9, "rate_gamma": 1.0, "send": "last", "prior_precision": 0.0, "temperature": 1e6, **teacher}
    config = parse_config({"client": {"epochs": EPOCHS, "batch_size": 9}, "teacher": settings})
    method = FedPPD(config)
    images = np.random.default_rng(0).integers(0, 256, (CLIENT_ROWS, 1, 28, 28)).astype(np.uint8)
    shard = ImageShard(images, np.arange(CLIENT_ROWS) % 10, config.dataset)
    state = GlobalState(0, method.initial_models())
    sent = method.local_update("client-00", state, shard, lambda: False).models["teacher"]
    moved = sent.astype(np.float64) - state.models["teacher"]
    return float((moved**2).mean()), moved.size


def test_a_clients_momentum_lasts_through_the_epochs_of_a_round() -> None:
    # Free motion: the noise of j steps ago has moved θ by its geometric sum (1 − (1 − a)^j) / a.
    variance, weights = travelled(sampler="sghmc", friction=0.2)
    single = 2 * 0.2 * 1e-9 * 1e6 / CLIENT_ROWS
    expected = single * sum(((1 - 0.8**past) / 0.2) ** 2 for past in range(1, EPOCHS * BATCHES + 1))
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / weights))


def test_a_clients_cycle_is_noisy_in_its_last_epochs_only() -> None:
    variance, weights = travelled(sampler="cyclical", sampling_epochs=2)
    rates = [1e-9 / 2 * (1 + math.cos(math.pi * epoch / EPOCHS)) for epoch in (1, 2)]
    expected = BATCHES * sum(rates) * 1e6 / CLIENT_ROWS
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / weights))
