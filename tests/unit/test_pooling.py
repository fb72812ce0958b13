"""Geometric pooling on the server, and rounds that average in between."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.bayes.ensemble import geometric_labels, pseudo_labels
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models, Receipt
from fedppd_ray.methods import build_method
from fedppd_ray.models.flat import FlatModel

METHODS = ["fedppd", "fedbe"]


def linear() -> FlatModel:
    return FlatModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4)))


def members(count: int, scale: float = 0.3) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.normal(scale=scale, size=36 * 4 + 4).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_the_pool_is_the_normalised_geometric_mean(pool: Shard, power: float) -> None:
    model, vectors = linear(), members(3)
    ours = geometric_labels(model, vectors, pool, power)
    inputs = pool.inputs(torch.arange(len(pool)))
    predictions = []
    for vector in vectors:
        model.load(vector)
        predictions.append(torch.softmax(model.module(inputs).double(), 1).tolist())
    for row in range(len(pool)):
        product = [math.prod(p[row][c] for p in predictions) ** (power / 3) for c in range(4)]
        naive = [value / sum(product) for value in product]
        assert ours[row].tolist() == pytest.approx(naive, abs=1e-5)


def test_of_one_member_the_pool_is_its_prediction_as_the_mixture_is(pool: Shard) -> None:
    model, vectors = linear(), members(1)
    torch.testing.assert_close(geometric_labels(model, vectors, pool, 1.0), pseudo_labels(model, vectors, pool, 1.0))


def test_sure_members_that_disagree_do_not_underflow(pool: Shard) -> None:
    labels = geometric_labels(linear(), members(2, scale=500.0), pool, 1.0)
    torch.testing.assert_close(labels.sum(1), torch.ones(len(pool)))


# ---- in the methods


def config_of(method: str, **distill: Any) -> Config:
    average = distill.pop("aggregate", "distill") == "average"
    server: dict[str, Any] = {"distill": {"epochs": 1, "batch_size": 10, "samples": 1, **distill}}
    if method == "fedppd":
        server["aggregate"] = "distill"
    values: dict[str, Any] = {"method": method, "data": {"server_pool": 20}, "server": server}
    if average:
        values = {"method": "fedavg" if method == "fedbe" else method}
    return parse_config({**values, "federation": {"clients": 2, "rounds": 12}})


@pytest.fixture(scope="module")
def digits() -> Shard:
    train = load("mnist5k").train
    return ImageShard(train.images[::150][:20], None, config_of("fedppd").dataset)


def aggregated(config: Config, round_id: int, digits: Shard) -> Models:
    method = build_method(config)
    state = GlobalState(round_id - 1, method.initial_models())
    noise = np.random.default_rng(0)
    aggregation = method.aggregation(state)
    for index in range(2):
        models = {
            role: vector * 2 + noise.normal(scale=0.1, size=vector.size).astype(np.float32)
            for role, vector in state.models.items()
        }
        aggregation.fold(ClientUpdate(Receipt(f"client-{index:02d}", round_id, 10), models))
    return aggregation.finish(digits).models


def same(first: Models, second: Models) -> bool:
    return all(np.array_equal(first[role], second[role]) for role in first)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_rounds_that_are_asked_for_distil(method: str, digits: Shard) -> None:
    """Every third from the sixth on; such a round distils as it always did, another averages bit for bit."""
    sometimes = config_of(method, every=3, from_round=6)
    for round_id, distils in ((3, False), (5, False), (6, True), (7, False), (9, True), (12, True)):
        other = config_of(method) if distils else config_of(method, aggregate="average")
        assert same(aggregated(sometimes, round_id, digits), aggregated(other, round_id, digits)), round_id
    always, never = config_of(method), config_of(method, aggregate="average")
    assert not same(aggregated(always, 6, digits), aggregated(never, 6, digits))


@pytest.mark.parametrize("method", METHODS)
def test_the_server_pools_as_it_is_told(method: str, digits: Shard) -> None:
    mixture = aggregated(config_of(method), 1, digits)
    assert same(mixture, aggregated(config_of(method, pooling="mixture"), 1, digits))
    geometric = aggregated(config_of(method, pooling="geometric"), 1, digits)
    assert not same(mixture, geometric)
    assert not same(geometric, aggregated(config_of(method, pooling="geometric", power=2.0), 1, digits))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("distill", "message"),
    [
        ({"pooling": "geometric", "sharpen": 0.5}, r"server\.distill\.sharpen: pooling=geometric has power instead"),
        ({"power": 2.0}, r"server\.distill\.power: pooling=mixture has sharpen instead"),
        ({"from_round": 13}, r"server\.distill: .*from_round=13 leave none of federation\.rounds=12"),
        ({"every": 13}, r"server\.distill: every=13 .* leave none"),
        ({"every": 7, "from_round": 8}, r"server\.distill: every=7 and from_round=8 leave none"),
    ],
)
def test_senseless_distillation_is_refused(method: str, distill: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(method, **distill)
