"""SWAG's moments, the mixture of several clients' Gaussians, and draws from it."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedppd_ray.bayes.swag import ClientGaussian, Mixture, SwagGaussian, SwagMoments, mix


def moments_of(snapshots: NDArray[np.float32], rank: int) -> SwagMoments:
    moments = SwagMoments(rank)
    for snapshot in snapshots:
        moments.add(torch.from_numpy(snapshot))
    return moments


def covariance(variance: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float64]:
    """½ (diag + F Fᵀ), with the factors as rows."""
    wide = factors.astype(np.float64)
    return 0.5 * (np.diag(variance.astype(np.float64)) + wide.T @ wide)


def test_moments_are_those_of_the_snapshots() -> None:
    snapshots = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    moments = moments_of(snapshots, rank=4)
    np.testing.assert_allclose(moments.mean, snapshots.mean(0), atol=1e-6)
    np.testing.assert_allclose(moments.variance, snapshots.var(0), atol=1e-6)
    expected = [snapshots[i] - snapshots[: i + 1].mean(0) for i in range(3, 7)]
    np.testing.assert_allclose(moments.deviations.reshape(4, 5), np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("weight", [1.0, 100.0])
def test_a_small_deviation_of_a_large_weight_is_not_lost(weight: float) -> None:
    """The snapshots are float32, whose grain at 100 is 8e-6; their variance is known to a part in a thousand."""
    snapshots = (weight + 1e-4 * np.random.default_rng(2).normal(size=(20, 400))).astype(np.float32)
    moments = moments_of(snapshots, rank=20)
    exact = snapshots.astype(np.float64).var(0)
    assert (exact > 0).all()
    np.testing.assert_allclose(moments.variance, exact, rtol=1e-3)


def test_the_mixtures_covariance_is_that_of_the_formula_on_the_diagonal_and_beside_it() -> None:
    """Σ p_k (Σ_k + (μ_k − μ)(μ_k − μ)ᵀ): nothing of the clients' own spread, or of that between them, is lost."""
    generator = np.random.default_rng(3)
    size, rank, weights = 6, 4, np.array([100, 300, 50, 200])
    snapshots = [generator.normal(k, 1, (rank, size)).astype(np.float32) for k in range(len(weights))]
    moments = [moments_of(own, rank) for own in snapshots]
    clients = [
        ClientGaussian(int(weight), own.mean, own.variance, own.deviations)
        for weight, own in zip(weights, moments, strict=True)
    ]
    mixed = mix(clients)
    shares = weights / weights.sum()
    means = np.stack([own.mean for own in moments]).astype(np.float64)
    middle = shares @ means
    own = [covariance(m.variance, m.deviations.reshape(rank, size) / np.sqrt(rank - 1)) for m in moments]
    apart = [np.outer(mean - middle, mean - middle) for mean in means]
    exact = sum(p * (a + b) for p, a, b in zip(shares, own, apart, strict=True))
    # Beside the diagonal only the low-rank part speaks, halved: there the formula holds for that part by itself.
    low_rank = sum(
        p * (m.deviations.reshape(rank, size).astype(np.float64).T @ m.deviations.reshape(rank, size) / (rank - 1) + b)
        for p, m, b in zip(shares, moments, apart, strict=True)
    )
    factors = mixed.factors.reshape(-1, size).astype(np.float64)
    np.testing.assert_allclose(mixed.mean, middle, rtol=1e-5)
    np.testing.assert_allclose(
        np.diag(covariance(mixed.variance, mixed.factors.reshape(-1, size))), np.diag(exact), rtol=1e-5
    )
    np.testing.assert_allclose(factors.T @ factors, low_rank, rtol=1e-5, atol=1e-6)


def test_ten_alike_clients_keep_the_trace_of_their_low_rank_part() -> None:
    deviations = np.random.default_rng(4).normal(size=(5, 30)).astype(np.float32)
    mean, variance = np.zeros(30, np.float32), np.ones(30, np.float32)
    mixed = mix([ClientGaussian(40, mean, variance, deviations.reshape(-1))] * 10)
    trace = (mixed.factors.astype(np.float64) ** 2).sum()
    assert trace == pytest.approx((deviations.astype(np.float64) ** 2).sum() / 4, rel=1e-5)


def test_a_sample_has_the_covariance_of_the_formula() -> None:
    """½ (diag + F Fᵀ): the sample covariance of n draws has entries within 5 standard errors of it."""
    generator = np.random.default_rng(2)
    mean, variance = generator.normal(size=4), generator.uniform(0.5, 2, 4)
    factors = generator.normal(size=(3, 4))
    single = [part.astype(np.float32) for part in (mean, variance, factors.reshape(-1))]
    draw = SwagGaussian(Mixture(*single), 4, torch.device("cpu"))
    count = 20_000
    stream = torch.Generator().manual_seed(3)
    samples = np.stack([draw(stream).numpy() for _ in range(count)])
    exact = 0.5 * (np.diag(variance) + factors.T @ factors)
    diagonal = np.diag(exact)
    error = np.sqrt((np.outer(diagonal, diagonal) + exact**2) / count)  # of a Gaussian's sample covariance
    assert (np.abs(np.cov(samples.T) - exact) < 5 * error).all()
    assert (np.abs(samples.mean(0) - mean) < 5 * np.sqrt(diagonal / count)).all()


def test_samples_leave_buffers_at_their_mean() -> None:
    mixture = Mixture(np.array([1, 2], np.float32), np.array([9, 9], np.float32), np.ones(4, np.float32))
    sample = SwagGaussian(mixture, 1, torch.device("cpu"))(torch.Generator().manual_seed(0))
    assert sample[1] == 2
    assert sample[0] != 1
