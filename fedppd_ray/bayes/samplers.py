"""Samplers of the teacher's posterior behind one step: SGLD, cyclical SGLD, SGHMC and pSGLD.

A sampler lives for one client's round, so momentum and preconditioner start anew in each. Its schedule says, epoch
by epoch (counted from 0), the rate and whether the epoch samples. An epoch that does not explores: no noise, and
the student learns nothing from it, whether distillation goes by epoch or by iteration, because its iterates are
not draws from the posterior. Every sampler targets the same tempered posterior exp(−U(θ)/T), U being the full-data
negative log posterior; tests/statistical checks the exact variance of each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedppd_ray.bayes.sgld import sgld_step


@dataclass(frozen=True)
class Target:
    """A client's tempered posterior: N rows, temperature T, prior N(0, I/τ)."""

    rows: int
    temperature: float
    prior_precision: float


@dataclass(frozen=True)
class Schedule:
    """The rate of each epoch; the first `exploration` epochs of a round do not sample."""

    rate: Callable[[int], float]
    exploration: int = 0

    def samples(self, epoch: int) -> bool:
        return epoch >= self.exploration


class Sampler(Protocol):
    @property
    def schedule(self) -> Schedule: ...

    def step(self, theta: Tensor, gradient: Tensor, *, epoch: int, generator: torch.Generator) -> None:
        """Move the flat weights θ in place; `gradient` is that of the mean cross-entropy, without the prior."""
        ...


class SGLD:
    """`sgld_step` by a schedule. With StepLR it is `sgld`, with a cosine and exploration `cyclical`.

    Cyclical: Zhang et al., "Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning", ICLR 2020.
    """

    def __init__(self, target: Target, schedule: Schedule) -> None:
        self.schedule = schedule
        self._target = target

    def step(self, theta: Tensor, gradient: Tensor, *, epoch: int, generator: torch.Generator) -> None:
        sgld_step(
            theta,
            gradient,
            step=self.schedule.rate(epoch),
            rows=self._target.rows,
            temperature=_temperature(self._target, self.schedule, epoch),
            prior_precision=self._target.prior_precision,
            generator=generator,
        )


class SGHMC:
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin, ICML 2014) with friction a.

        v ← (1 − a) v − η ḡ + sqrt(2 a η T / N) ξ,   θ ← θ + v,   v = 0 at the start of a round

    T = 0 is gradient descent with rate η and momentum 1 − a. Once the momentum is up, the drift is η/a a step
    where SGLD's is η/2: `sgld` at rate 2η/a goes as fast.

    On a quadratic with full-data precision λ and ε = η/N the exact stationary variance is
    T / (λ (1 − ελ / (2 (2 − a)))). For a = 1 that is SGLD's at twice the step, as it should be.
    """

    def __init__(self, target: Target, schedule: Schedule, friction: float) -> None:
        self.schedule = schedule
        self._target = target
        self._friction = friction
        self._velocity: Tensor | None = None

    @torch.no_grad()
    def step(self, theta: Tensor, gradient: Tensor, *, epoch: int, generator: torch.Generator) -> None:
        target, rate = self._target, self.schedule.rate(epoch)
        if self._velocity is None:
            self._velocity = torch.zeros_like(theta)
        velocity = self._velocity
        velocity.mul_(1 - self._friction).add_(gradient, alpha=-rate)
        velocity.add_(theta, alpha=-rate * target.prior_precision / target.rows)
        temperature = _temperature(target, self.schedule, epoch)
        if temperature > 0:
            noise = torch.empty_like(theta).normal_(generator=generator)
            velocity.add_(noise, alpha=math.sqrt(2 * self._friction * rate * temperature / target.rows))
        theta.add_(velocity)


class PSGLD:
    """Preconditioned SGLD (Li et al., AAAI 2016), its preconditioner frozen while sampling.

        θ ← θ − (η/2) G ḡ + sqrt(η T G / N) ξ

    Exploring, G follows the gradients g as in RMSprop: V ← d V + (1 − d) g², s = sqrt(V) and G = 1 / (e + s / mean(s)).
    Dividing by the mean over the weights keeps η on SGLD's scale (a weight with gradients of average size has G near
    1, one without any G = 1/e) and cancels the factor 1 − dᵗ that V lacks after t steps. Sampling, G is a constant,
    so the correction Γ_i = Σ_j ∂G_ij/∂θ_j, which practice drops at the price of a wrong target, is exactly zero.

    On a quadratic with full-data precision λ_i and ε = η/N the exact stationary variance of weight i is
    T / (λ_i (1 − ε G_i λ_i / 4)).
    """

    def __init__(self, target: Target, schedule: Schedule, decay: float, epsilon: float) -> None:
        self.schedule = schedule
        self.preconditioner: Tensor | None = None
        self._target = target
        self._decay = decay
        self._epsilon = epsilon
        self._second_moment: Tensor | None = None

    @torch.no_grad()
    def step(self, theta: Tensor, gradient: Tensor, *, epoch: int, generator: torch.Generator) -> None:
        target, rate = self._target, self.schedule.rate(epoch)
        if not self.schedule.samples(epoch):
            self.preconditioner = self._estimate(gradient)
        if self.preconditioner is None:
            raise ValueError("psgld cannot sample before it has explored: its preconditioner is not estimated yet")
        drift = gradient.add(theta, alpha=target.prior_precision / target.rows)
        theta.addcmul_(self.preconditioner, drift, value=-rate / 2)
        temperature = _temperature(target, self.schedule, epoch)
        if temperature > 0:
            noise = torch.empty_like(theta).normal_(generator=generator)
            theta.addcmul_(self.preconditioner.sqrt(), noise, value=math.sqrt(rate * temperature / target.rows))

    def _estimate(self, gradient: Tensor) -> Tensor:
        if self._second_moment is None:
            self._second_moment = torch.zeros_like(gradient)
        self._second_moment.mul_(self._decay).addcmul_(gradient, gradient, value=1 - self._decay)
        size = self._second_moment.sqrt()
        # Without any gradient at all, every weight is one without gradient.
        relative = size.div_(size.mean().clamp_min_(torch.finfo(size.dtype).tiny))
        return relative.add_(self._epsilon).reciprocal_()


def cosine_rate(base: float, epochs: int, epoch: int) -> float:
    """One cycle a round: η_e = η/2 (1 + cos(π e / E)), from η in the first epoch down, never to 0."""
    return base / 2 * (1 + math.cos(math.pi * epoch / epochs))


def _temperature(target: Target, schedule: Schedule, epoch: int) -> float:
    return target.temperature if schedule.samples(epoch) else 0.0
