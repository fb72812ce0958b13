"""SWAG: a Gaussian over the weights from the iterates of SGD (Maddox et al., NeurIPS 2019), and a mixture of several.

A client's Gaussian has mean μ_k and covariance Σ_k = ½ (diag(s_k) + D_k D_kᵀ / (R − 1)): s_k is the variance of its
snapshots, D_k their last R deviations from the running mean. The clients' mixture has mean μ = Σ p_k μ_k and covariance
Σ p_k (Σ_k + (μ_k − μ)(μ_k − μ)ᵀ): what the clients say of their own uncertainty, and how far apart they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppd_ray.models.flat import Vector


class SwagMoments:
    """Mean, variance and the last `rank` deviations of the vectors it is shown, in float64.

    The variance is accumulated centred (Welford): E[x²] − E[x]² in float32 is all rounding error where a weight's
    deviation is small against its size.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._mean = self._squares = torch.zeros(())
        self._deviations: list[Tensor] = []

    def add(self, vector: Tensor) -> None:
        value = vector.detach().double()
        self._count += 1
        before = value - self._mean
        self._mean = self._mean + before / self._count
        after = value - self._mean
        self._squares = self._squares + before * after
        self._deviations = [*self._deviations, after][-self._rank :]

    @property
    def mean(self) -> Vector:
        return _single(self._mean)

    @property
    def variance(self) -> Vector:
        """Of the snapshots, the sum of squares divided by their number."""
        return _single(self._squares / self._count)

    @property
    def deviations(self) -> Vector:
        """rank × size, flattened."""
        return _single(torch.stack(self._deviations).flatten())


def _single(values: Tensor) -> Vector:
    vector: Vector = values.float().cpu().numpy()
    return vector


@dataclass(frozen=True)
class ClientGaussian:
    """What a client sends: `deviations` is rank × size, flattened; `weight` is its number of rows."""

    weight: int
    mean: Vector
    variance: Vector
    deviations: Vector


@dataclass(frozen=True)
class Mixture:
    """A Gaussian with the mixture's moments: covariance ½ (diag(variance) + factors · factorsᵀ)."""

    mean: Vector
    variance: Vector
    factors: Vector  # (clients · (rank + 1)) × size, flattened


def mix(clients: Sequence[ClientGaussian]) -> Mixture:
    """Moments of the mixture, exactly: on the diagonal Σ p_k (s_k + (μ_k − μ)²), and in the low-rank part the factors

        sqrt(p_k / (R − 1)) D_k  and  sqrt(p_k) (μ_k − μ)  of every client.

    Each part holds the spread between the clients once, and their sum is halved, so the covariance holds it once.
    """
    total = sum(client.weight for client in clients)
    mean: NDArray[np.float64] = np.zeros(clients[0].mean.size)
    for client in clients:
        mean += client.weight / total * client.mean.astype(np.float64)
    variance = np.zeros_like(mean)
    factors: list[NDArray[np.float32]] = []
    for client in clients:
        share = client.weight / total
        apart = client.mean - mean
        variance += share * (client.variance + apart**2)
        deviations = client.deviations.reshape(-1, mean.size)
        factors.append((math.sqrt(share / max(1, len(deviations) - 1)) * deviations).astype(np.float32))
        factors.append((math.sqrt(share) * apart).astype(np.float32)[None])
    return Mixture(mean.astype(np.float32), variance.astype(np.float32), np.concatenate(factors).reshape(-1))


class SwagGaussian:
    """Draws networks from a mixture. Buffers stay at their mean: a running variance must not be negative."""

    def __init__(self, mixture: Mixture, parameters: int, device: torch.device) -> None:
        self._mean = torch.from_numpy(mixture.mean.copy())
        self._deviation = torch.from_numpy(np.sqrt(mixture.variance))
        self._factors = torch.from_numpy(mixture.factors.copy()).view(-1, len(self._mean))
        self._parameters = parameters
        self._device = device

    def __call__(self, generator: torch.Generator) -> Tensor:
        """μ + sqrt(1/2) (sqrt(diag) z₁ + F z₂), z₁, z₂ ~ N(0, I). Drawn on the CPU: the same on every device."""
        z1 = torch.empty_like(self._mean).normal_(generator=generator)
        z2 = torch.empty(len(self._factors)).normal_(generator=generator)
        spread = self._deviation * z1 + z2 @ self._factors
        spread[self._parameters :] = 0
        return (self._mean + math.sqrt(0.5) * spread).to(self._device)
