"""FedAvg, FedBE, FedAvg+SWAG and FedPA, through the methods' own interface."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.bayes.swag import Mixture, SwagGaussian
from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.errors import ConfigError, LocalUpdateCancelled
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models, Receipt
from fedppd_ray.methods import build_method, method_class
from fedppd_ray.methods.fedpa import posterior_delta
from fedppd_ray.methods.fedswag import DEVIATIONS, FACTORS, MEAN, VARIANCE
from fedppd_ray.models.networks import seed_dropout
from fedppd_ray.seeding import generator_for

Tiny = Callable[..., Config]
ROWS = 30
BASELINES = ("fedavg", "fedbe", "fedswag", "fedpa")


@pytest.fixture(scope="module")
def shard(tiny: Tiny) -> Shard:
    train = load("mnist5k").train
    return ImageShard(train.images[::133][:ROWS], train.labels[::133][:ROWS], tiny().dataset)


@pytest.fixture(scope="module")
def pool(tiny: Tiny) -> Shard:
    train = load("mnist5k").train
    return ImageShard(train.images[::150][:20], None, tiny().dataset)


def never() -> bool:
    return False


def start(method: Any, round_id: int = 0) -> GlobalState:
    return GlobalState(round_id, method.initial_models())


def aggregated(config: Config, state: GlobalState, updates: list[tuple[int, Models]], pool: Shard) -> Models:
    round_sum = build_method(config).aggregation(state)
    for index, (rows, models) in enumerate(updates):
        round_sum.fold(ClientUpdate(Receipt(f"client-{index:02d}", state.round + 1, rows), models))
    return round_sum.finish(pool).models


# ---- all of them


@pytest.mark.parametrize("name", METHODS)
def test_what_a_client_sends_is_what_the_server_expects(name: str, tiny: Tiny, shard: Shard) -> None:
    config = tiny(method=name, federation={"rounds": 2}, client={"epochs": 3}, fedpa={"burn_in": 1})
    method = build_method(config)
    for round_id in (0, 1):  # the second is the last, in which FedSWAG sends more
        state = start(method, round_id)
        sent = method.local_update("client-00", state, shard, never).models
        assert {role: vector.size for role, vector in sent.items()} == method.update_sizes(state)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baselines_local_update_is_the_same_bit_for_bit_every_time(name: str, tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny(method=name, client={"epochs": 2}, fedpa={"burn_in": 0}))
    state = start(method)
    first = method.local_update("client-00", state, shard, never).models
    method.local_update("client-01", state, shard, never)
    again = method.local_update("client-00", state, shard, never).models
    assert all(np.array_equal(first[role], again[role]) for role in first)


@pytest.mark.parametrize("name", BASELINES)
def test_a_cancelled_baseline_stops(name: str, tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny(method=name, client={"epochs": 2}, fedpa={"burn_in": 0}))
    with pytest.raises(LocalUpdateCancelled):
        method.local_update("client-00", start(method), shard, lambda: True)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baselines_exported_network_is_the_one_that_its_config_names(name: str, tiny: Tiny) -> None:
    for network, parameters in (("teacher", 21_840), ("student", 85_670)):
        config = tiny(method=name, client={"epochs": 2}, fedpa={"burn_in": 0}, baseline={"network": network})
        method = build_method(config)
        assert method_class(config).exported_network(config) == f"mnist_{network}"
        assert method.student(method.initial_models()).layout.parameters == parameters


def test_every_method_starts_from_the_same_teacher(tiny: Tiny) -> None:
    starts = {
        name: build_method(tiny(method=name, client={"epochs": 2}, fedpa={"burn_in": 0})).initial_models()
        for name in METHODS
    }
    teacher = starts.pop("fedppd")["teacher"]
    assert all(np.array_equal(models["model"], teacher) for models in starts.values())


# ---- FedAvg


def test_fedavg_is_plain_sgd_with_weight_decay(tiny: Tiny, shard: Shard) -> None:
    """Against torch.optim.SGD on the same batches; momentum too."""
    for momentum in (0.0, 0.9):
        baseline = {"rate": 0.03, "momentum": momentum, "weight_decay": 0.01, "rate_step": 2}
        client = {"epochs": 3, "rate_decay": 0.8}
        config = tiny(method="fedavg", client=client, baseline=baseline)
        method: Any = build_method(config)
        state = start(method, 2)
        ours = method.local_update("client-00", state, shard, never).models["model"]

        reference: Any = build_method(config)
        reference.network.load(state.models["model"])
        generator = generator_for(config.seed, "local", 3, "client-00")
        seed_dropout(reference.network.module, generator)
        reference.network.module.train()
        parameters = list(reference.network.module.parameters())
        optimiser = torch.optim.SGD(parameters, lr=0.03 * 0.8**2, momentum=momentum, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 2, config.baseline.rate_gamma)
        for _ in range(3):
            for inputs, rows in shard.batches(config.client.batch_size, generator):
                optimiser.zero_grad(set_to_none=False)
                assert shard.labels is not None
                F.cross_entropy(reference.network.module(inputs), shard.labels[rows]).backward()
                optimiser.step()
            schedule.step()
        np.testing.assert_allclose(ours, reference.network.export(), atol=2e-6)
        assert not np.allclose(ours, state.models["model"], atol=1e-4)


def test_fedavgs_default_rate_is_the_drift_of_the_default_chain(tiny: Tiny) -> None:
    assert tiny(method="fedavg").baseline.rate == tiny().teacher.rate / 2


def test_fedavg_averages_by_rows(tiny: Tiny, pool: Shard) -> None:
    config = tiny(method="fedavg")
    method: Any = build_method(config)
    state = start(method)
    ones = np.ones(method.network.layout.size, np.float32)
    result = aggregated(config, state, [(10, {"model": ones}), (30, {"model": 5 * ones})], pool)
    np.testing.assert_allclose(result["model"], 4 * ones)


# ---- FedBE


def test_fedbe_moves_the_average_towards_the_ensemble(tiny: Tiny, pool: Shard) -> None:
    """The distilled model predicts what the clients predict together better than their plain average does."""
    distill = {"epochs": 20, "batch_size": 10, "teacher_rate": 0.01, "samples": 4}
    config = tiny(method="fedbe", server={"distill": distill})
    state = start(build_method(config))
    # Around one sharp model: of clients that know nothing the ensemble has nothing to teach.
    sharp = 3 * state.models["model"]
    noise = np.random.default_rng(0).normal(scale=0.1, size=(3, sharp.size)).astype(np.float32)
    clients = [{"model": sharp + part} for part in noise]
    distilled = aggregated(config, state, [(10, models) for models in clients], pool)["model"]
    average = aggregated(tiny(method="fedavg"), state, [(10, models) for models in clients], pool)["model"]

    def log_probabilities(models: Models) -> torch.Tensor:
        return build_method(config).predictor(models)(pool.inputs(torch.arange(len(pool))))

    targets = torch.stack([log_probabilities(models).exp() for models in clients]).mean(0)

    def loss(vector: np.ndarray) -> float:
        return float(-(targets * log_probabilities({"model": vector})).sum(1).mean())

    assert not np.array_equal(distilled, average)
    assert loss(distilled) < loss(average)


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_fedbe_distils_its_network_at_that_networks_rate(tiny: Tiny, pool: Shard, network: str) -> None:
    rates = {"teacher_rate": 0.02, "student_rate": 0.05}

    def distilled(**changes: float) -> np.ndarray:
        distill = {"epochs": 2, "batch_size": 10, "samples": 2, **rates, **changes}
        config = tiny(method="fedbe", baseline={"network": network}, server={"distill": distill})
        state = start(build_method(config))
        return aggregated(config, state, [(10, {"model": 2 * state.models["model"]})], pool)["model"]

    other = "student" if network == "teacher" else "teacher"
    assert np.array_equal(distilled(), distilled(**{f"{other}_rate": 0.5}))
    assert not np.array_equal(distilled(), distilled(**{f"{network}_rate": 0.5}))


def test_fedbe_without_a_pool_is_refused_by_its_config(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"data\.server_pool"):
        tiny(method="fedbe", data={"server_pool": 0})


# ---- FedAvg + SWAG


def test_fedswag_is_fedavg_bit_for_bit_until_the_last_round(tiny: Tiny, shard: Shard) -> None:
    swag, average = (build_method(tiny(method=name, federation={"rounds": 5})) for name in ("fedswag", "fedavg"))
    state = start(average, 2)
    first = swag.local_update("client-00", state, shard, never).models
    assert set(first) == {"model"}
    assert np.array_equal(first["model"], average.local_update("client-00", state, shard, never).models["model"])
    last = swag.local_update("client-00", GlobalState(4, state.models), shard, never).models
    plain = average.local_update("client-00", GlobalState(4, state.models), shard, never).models
    assert np.array_equal(last["model"], plain["model"])
    assert set(last) == {"model", MEAN, VARIANCE, DEVIATIONS}


def test_fedswag_predicts_by_the_mean_of_thirty_networks(tiny: Tiny, shard: Shard, pool: Shard) -> None:
    config = tiny(method="fedswag", federation={"rounds": 1}, client={"epochs": 4}, baseline={"rate": 0.1})
    method: Any = build_method(config)
    state = start(method)
    models = aggregated(
        config,
        state,
        [(10 + k, method.local_update(f"client-{k:02d}", state, shard, never).models) for k in range(2)],
        pool,
    )
    inputs = shard.inputs(torch.arange(len(shard)))
    answer = method.predictor(models)(inputs).exp()
    mixture = Mixture(models[MEAN], models[VARIANCE], models[FACTORS])
    draw = SwagGaussian(mixture, method.network.layout.parameters, torch.device("cpu"))
    reference: Any = build_method(config)
    reference.network.module.eval()
    total = torch.zeros_like(answer)
    for index in range(30):
        with torch.no_grad():
            reference.network.vector.copy_(draw(generator_for(config.seed, f"swag/{index}")))
            total += torch.softmax(reference.network.module(inputs).double(), 1)
    torch.testing.assert_close(answer, total / 30)
    torch.testing.assert_close(answer.sum(1), torch.ones(len(shard), dtype=torch.float64))
    assert torch.equal(method.predictor(models)(inputs).exp(), answer)


# ---- FedPA


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.floats(0, 3), st.integers(0, 999))
def test_fedpas_delta_is_the_closed_form(count: int, size: int, rho: float, seed: int) -> None:
    """Σ̂⁻¹(x̄ − θ), Σ̂ = ρ_n I + (1 − ρ_n) S, ρ_n = 1/(1 + (n − 1)ρ), S with ddof 1."""
    generator = np.random.default_rng(seed)
    theta, samples = generator.normal(size=size), generator.normal(size=(count, size))
    shrink = 1 / (1 + (count - 1) * rho)
    covariance = np.atleast_2d(np.cov(samples.T, ddof=1)) if count > 1 else np.zeros((size, size))
    estimate = shrink * np.eye(size) + (1 - shrink) * covariance
    expected = np.linalg.solve(estimate, samples.mean(0) - theta)
    ours = posterior_delta(torch.from_numpy(theta), list(torch.from_numpy(samples)), rho).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-8)


def test_fedpa_sends_the_global_model_plus_its_delta(tiny: Tiny, shard: Shard) -> None:
    """With one sample the delta is x_1 − θ, so what is sent is the mean of the epoch's iterates."""
    config = tiny(method="fedpa", client={"epochs": 2}, fedpa={"burn_in": 1})
    method: Any = build_method(config)
    state = start(method)
    sent = method.local_update("client-00", state, shard, never).models["model"]
    iterates: list[np.ndarray] = []
    walk = build_method(tiny(method="fedavg", client={"epochs": 2}))
    for _ in walk.epochs("client-00", state, shard, never, lambda: iterates.append(walk.network.export())):  # type: ignore[attr-defined]
        pass
    np.testing.assert_allclose(sent, np.mean(iterates[len(iterates) // 2 :], axis=0), atol=1e-6)


def test_fedpa_is_fedavg_before_its_start_round(tiny: Tiny, shard: Shard, pool: Shard) -> None:
    config = tiny(method="fedpa", client={"epochs": 2}, fedpa={"burn_in": 0, "start_round": 3, "server_rate": 0.5})
    average = tiny(method="fedavg", client={"epochs": 2})
    state = start(build_method(config), 1)
    sent = [build_method(c).local_update("client-00", state, shard, never).models for c in (config, average)]
    assert np.array_equal(sent[0]["model"], sent[1]["model"])
    results = [aggregated(c, state, [(10, sent[0])], pool)["model"] for c in (config, average)]
    assert np.array_equal(results[0], results[1])
    later = GlobalState(2, state.models)
    assert not np.array_equal(
        build_method(config).local_update("client-00", later, shard, never).models["model"],
        build_method(average).local_update("client-00", later, shard, never).models["model"],
    )


def test_fedpas_server_steps_by_its_rate(tiny: Tiny, pool: Shard) -> None:
    config = tiny(method="fedpa", client={"epochs": 2}, fedpa={"burn_in": 0, "server_rate": 0.25})
    method: Any = build_method(config)
    state = start(method)
    sent = {"model": state.models["model"] + np.float32(4)}
    np.testing.assert_allclose(
        aggregated(config, state, [(10, sent)], pool)["model"], state.models["model"] + 1, atol=1e-5
    )


def test_fedpa_without_an_epoch_to_sample_in_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"fedpa\.burn_in"):
        tiny(method="fedpa", client={"epochs": 3}, fedpa={"burn_in": 3})
