"""Samples of the server's Gaussian have the mean and spread of the formula, tensor by tensor.

Bounds: a mean of M samples has standard error sd/sqrt(M), a standard deviation sd/sqrt(2M). The largest of D
coordinates is compared, so six standard errors are allowed (probability D · 2e-9).
"""

import math

import numpy as np
import pytest
from torch import nn

from fedppd_ray.bayes.ensemble import gaussian_samples
from fedppd_ray.methods.settings import DistillConfig
from fedppd_ray.models.flat import Layout, Vector
from fedppd_ray.seeding import generator_for

SAMPLES = 4000
LAYOUT = Layout.of(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
CONFIG = DistillConfig(samples=SAMPLES, spread=0.4, scale=1.3, min_variance=1e-3)


def models() -> tuple[Vector, list[Vector]]:
    generator = np.random.default_rng(0)
    start = generator.normal(size=LAYOUT.size).astype(np.float32)
    # Clients move in a common direction, each its own way, by very different lengths in different tensors.
    common = generator.normal(size=LAYOUT.size)
    clients = []
    for _ in range(5):
        delta = (common + 0.5 * generator.normal(size=LAYOUT.size)) * generator.uniform(0.5, 2)
        delta[: 6 * 4] *= 10
        clients.append((start + delta).astype(np.float32))
    return start, clients


def drawn(config: DistillConfig = CONFIG) -> np.ndarray:
    start, clients = models()
    return np.stack(gaussian_samples(start, clients, LAYOUT, config, generator_for(0, "gaussian"))).astype(np.float64)


def expected(config: DistillConfig = CONFIG) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation by the formula, written out for one tensor at a time."""
    start, clients = models()
    mean, deviation = np.empty(LAYOUT.size), np.zeros(LAYOUT.size)
    for slot in LAYOUT.slots:
        part = slice(slot.start, slot.stop)
        if slot.start >= LAYOUT.parameters:
            mean[part] = np.mean([client[part] for client in clients], axis=0)
            continue
        deltas = [client[part].astype(np.float64) - start[part] for client in clients]
        norms = [math.sqrt(sum(delta**2)) for delta in deltas]
        unit = np.array([delta / norm for delta, norm in zip(deltas, norms, strict=True)])
        length = config.scale * sum(norms) / len(norms)
        variance = np.maximum(unit.var(axis=0), config.min_variance)
        mean[part] = start[part] + length * unit.mean(axis=0)
        deviation[part] = length * config.spread * np.sqrt(variance)
    return mean, deviation


PARAMETERS = slice(0, LAYOUT.parameters)


def test_the_mean_of_the_samples_is_the_formulas() -> None:
    mean, deviation = expected()
    standard_error = deviation[PARAMETERS] / math.sqrt(SAMPLES)
    assert (np.abs(drawn().mean(axis=0) - mean)[PARAMETERS] < 6 * standard_error).all()


def test_the_spread_of_the_samples_is_the_formulas() -> None:
    _, deviation = expected()
    relative = drawn().std(axis=0)[PARAMETERS] / deviation[PARAMETERS] - 1
    assert np.abs(relative).max() < 6 / math.sqrt(2 * SAMPLES)


def test_coordinates_are_independent() -> None:
    mean, deviation = expected()
    standardised = ((drawn() - mean) / np.where(deviation > 0, deviation, 1))[:, PARAMETERS]
    correlation = np.abs(standardised.T @ standardised / SAMPLES - np.eye(LAYOUT.parameters))
    np.fill_diagonal(correlation, 0)
    assert correlation.max() < 6 / math.sqrt(SAMPLES)


def test_buffers_take_the_clients_mean_in_every_sample() -> None:
    mean, _ = expected()
    assert drawn()[:, LAYOUT.parameters :] == pytest.approx(
        np.tile(mean[LAYOUT.parameters :], (SAMPLES, 1)), rel=1e-6, abs=1e-6
    )


def test_the_variance_has_a_floor() -> None:
    config = CONFIG.model_copy(update={"min_variance": 0.3})
    _, deviation = expected(config)
    relative = drawn(config).std(axis=0)[PARAMETERS] / deviation[PARAMETERS] - 1
    assert np.abs(relative).max() < 6 / math.sqrt(2 * SAMPLES)


def test_without_spread_every_sample_is_the_mean() -> None:
    config = CONFIG.model_copy(update={"samples": 3, "spread": 0.0})
    mean, _ = expected(config)
    assert drawn(config) == pytest.approx(np.tile(mean, (3, 1)), rel=1e-5, abs=1e-5)


def test_clients_that_did_not_move_give_the_start_and_no_nan() -> None:
    start, _ = models()
    samples = gaussian_samples(
        start, [start, start], LAYOUT, CONFIG.model_copy(update={"samples": 2}), generator_for(0, "g")
    )
    for sample in samples:
        assert np.array_equal(sample, start)


def test_no_samples_are_none() -> None:
    start, clients = models()
    assert gaussian_samples(start, clients, LAYOUT, DistillConfig(samples=0), generator_for(0, "g")) == []
