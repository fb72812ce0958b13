"""Stochastic gradient Langevin dynamics, correctly scaled.

Welling & Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011, in the units of a mean
loss.
"""

import math

import torch
from torch import Tensor


@torch.no_grad()
def sgld_step(
    theta: Tensor,
    gradient: Tensor,
    *,
    step: float,
    rows: int,
    temperature: float,
    prior_precision: float,
    generator: torch.Generator,
) -> None:
    """One SGLD step on the flat weights θ, in place.

    With ḡ = ∇(mean cross-entropy) + (τ/N) θ, prior precision τ, N rows and step size η:

        θ ← θ − (η/2) ḡ + sqrt(η T / N) ξ,   ξ ~ N(0, I)

    In the paper's notation α = η/N: the drift is α/2 times the gradient of the full-data log posterior and the
    noise has variance α T. T = 1 samples the Bayes posterior; T = 0 is gradient descent with rate η/2 and
    weight decay τ/N.

    On a quadratic with full-data precision λ and ε = η/N the chain θ ← (1 − ελ/2) θ + sqrt(εT) ξ has the exact
    stationary variance T / (λ (1 − ελ/4)).
    """
    theta.mul_(1 - step * prior_precision / (2 * rows)).add_(gradient, alpha=-step / 2)
    if temperature > 0:
        noise = torch.empty_like(theta).normal_(generator=generator)
        theta.add_(noise, alpha=math.sqrt(step * temperature / rows))


def log_prior(theta: Tensor, prior_precision: float) -> float:
    """log N(θ | 0, I/τ) up to a constant."""
    return -0.5 * prior_precision * float(theta.double().square().sum())


def step_rate(base: float, epoch: int, every: int, gamma: float) -> float:
    """StepLR: multiplied by `gamma` after each `every` epochs (epochs count from 0)."""
    return float(base * gamma ** (epoch // every))
