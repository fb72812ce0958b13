"""A client's local update and the server's aggregation, through the method's own interface."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.bayes.ensemble import Distillation, distil_ensemble, gaussian_samples, pseudo_labels
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models, Receipt
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import LocalResult, Method
from fedppd_ray.methods.settings import DistillConfig
from fedppd_ray.seeding import generator_for

Tiny = Callable[..., Config]
ROWS = 30


def at_rate(settings: DistillConfig, rate: float) -> Distillation:
    return settings.model_copy(update={"teacher_rate": rate}).plan("teacher")


@pytest.fixture(scope="module")
def shard(tiny: Tiny) -> Shard:
    train = load("mnist5k").train
    return ImageShard(train.images[::133][:ROWS], train.labels[::133][:ROWS], tiny().dataset)


def start_of(method: Method, sharpness: float = 1.0) -> GlobalState:
    """The initial state; a sharper teacher has something to teach."""
    models = dict(method.initial_models())
    models["teacher"] = models["teacher"] * np.float32(sharpness)
    return GlobalState(0, models)


def update(config: Config, shard: Shard, client: str = "client-00", sharpness: float = 1.0) -> LocalResult:
    method = build_method(config)
    return method.local_update(client, start_of(method, sharpness), shard, lambda: False)


def log_probabilities(method: Any, role: str, vector: np.ndarray, shard: Shard) -> torch.Tensor:
    network = method.networks_by_role[role]
    network.load(vector)
    network.module.eval()
    with torch.no_grad():
        return torch.log_softmax(network.module(shard.inputs(torch.arange(len(shard)))).double(), 1)


def same(first: Models, second: Models) -> bool:
    return all(np.array_equal(first[role], second[role]) for role in first)


def test_a_local_update_is_the_same_bit_for_bit_every_time(tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny())
    state = start_of(method)
    first = method.local_update("client-00", state, shard, lambda: False)
    method.local_update("client-01", state, shard, lambda: False)  # another client in between, same networks
    again = method.local_update("client-00", state, shard, lambda: False)
    assert same(first.models, again.models)
    assert first.metrics == again.metrics


def test_clients_rounds_and_seeds_have_their_own_randomness(tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny())
    state = start_of(method)
    first = method.local_update("client-00", state, shard, lambda: False)
    other = method.local_update("client-01", state, shard, lambda: False)
    later = method.local_update("client-00", GlobalState(1, state.models), shard, lambda: False)
    assert not same(first.models, other.models)
    assert not same(first.models, later.models)
    assert not same(build_method(tiny(seed=4)).initial_models(), state.models)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_a_local_update_leaves_the_state_and_global_randomness_alone(tiny: Tiny, shard: Shard, every: str) -> None:
    method = build_method(tiny(student={"distill_every": every}))
    state = start_of(method)
    kept = {role: vector.copy() for role, vector in state.models.items()}
    for vector in state.models.values():
        vector.setflags(write=False)
    before = torch.get_rng_state()
    method.local_update("client-00", state, shard, lambda: False)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(state.models, kept)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_distillation_brings_the_student_nearer_to_the_teacher(tiny: Tiny, shard: Shard, every: str) -> None:
    config = tiny(
        client={"epochs": 15},
        teacher={"rate": 1e-9, "temperature": 0},
        student={"distill_every": every, "rate": 0.1},
    )
    method = build_method(config)
    state = start_of(method, sharpness=2.0)
    result = method.local_update("client-00", state, shard, lambda: False)
    target = log_probabilities(method, "teacher", state.models["teacher"], shard)

    def divergence(student: np.ndarray) -> float:
        log_q = log_probabilities(method, "student", student, shard)
        return float((target.exp() * (target - log_q)).sum(1).mean())

    assert divergence(result.models["student"]) < 0.6 * divergence(state.models["student"])


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_the_teacher_learns_its_labels(tiny: Tiny, shard: Shard, every: str) -> None:
    settings = {"rate": 0.3, "rate_gamma": 1.0, "temperature": 0}
    config = tiny(client={"epochs": 30}, teacher=settings, student={"distill_every": every})
    method = build_method(config)
    state = start_of(method)
    result = method.local_update("client-00", state, shard, lambda: False)
    assert shard.labels is not None
    before, after = (
        float(torch.nn.functional.nll_loss(log_probabilities(method, "teacher", vector, shard), shard.labels))
        for vector in (state.models["teacher"], result.models["teacher"])
    )
    assert after < 0.5 * before


def density_of(config: Config, teacher: np.ndarray, shard: Shard, precision: float) -> float:
    """log p(D | θ) + log p(θ) per row, on the rows as they are, without dropout."""
    assert shard.labels is not None
    log_p = log_probabilities(build_method(config), "teacher", teacher, shard).double()
    likelihood = float(log_p.gather(1, shard.labels[:, None]).sum())
    return (likelihood - 0.5 * precision * float((teacher.astype(np.float64) ** 2).sum())) / len(shard)


def test_the_reported_density_is_the_log_posterior_of_the_sent_teacher_without_dropout(
    tiny: Tiny, shard: Shard
) -> None:
    config = tiny(client={"epochs": 2}, teacher={"prior_precision": 2.5})
    result = update(config, shard)
    expected = density_of(config, result.models["teacher"], shard, 2.5)
    assert result.metrics["log_posterior_per_row"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_map_sends_the_sample_of_highest_density_and_last_the_last(tiny: Tiny, shard: Shard, every: str) -> None:
    # Hot enough that the density goes up and down; a run of k epochs is the beginning of a longer one. Strong noise on
    # the student's inputs: what the student is shown says little about the density on the rows themselves.
    settings = {"rate": 0.5, "temperature": 0.05, "rate_step": 99, "prior_precision": 0.0}
    student = {"input_noise": 3.0, "distill_every": every}
    epochs = 6

    def config(count: int, send: str) -> Config:
        return tiny(client={"epochs": count}, teacher={**settings, "send": send}, student=student)

    samples = [update(config(count, "last"), shard) for count in range(1, epochs + 1)]
    assert all("log_posterior_per_row" not in sample.metrics for sample in samples)  # nobody asked for it
    densities = [density_of(tiny(), sample.models["teacher"], shard, 0.0) for sample in samples]
    best = int(np.argmax(densities))
    assert 0 < best < epochs - 1  # neither first nor last: the test can tell
    sent = update(config(epochs, "map"), shard)
    assert np.array_equal(sent.models["teacher"], samples[best].models["teacher"])
    assert sent.metrics["log_posterior_per_row"] == pytest.approx(densities[best], rel=1e-6)
    assert np.array_equal(sent.models["student"], samples[-1].models["student"])


def test_the_prior_shrinks_the_weights_by_the_clients_rows(tiny: Tiny, shard: Shard) -> None:
    # At a tiny rate only the prior moves: three steps of 1 − ητ/2N = 0.95 each.
    rate = 1e-8
    precision = 0.1 * ROWS / rate
    settings = {"rate": rate, "temperature": 0, "send": "last", "rate_gamma": 1.0}
    config = tiny(client={"batch_size": 10}, teacher={**settings, "prior_precision": precision})
    start = start_of(build_method(config)).models["teacher"]
    np.testing.assert_allclose(update(config, shard).models["teacher"], 0.95**3 * start, rtol=1e-4, atol=1e-6)
    scaled = tiny(client={"batch_size": 10}, teacher={**settings, "prior_precision": f"{precision / ROWS}*N"})
    assert same(update(scaled, shard).models, update(config, shard).models)


def test_the_rates_of_teacher_and_student_decay_from_round_to_round(tiny: Tiny, shard: Shard) -> None:
    # At tiny rates only prior and weight decay move: three steps of 1 − 0.1 · 0.5² = 0.975 in the third round.
    rate = 1e-8
    settings = {"rate": rate, "temperature": 0, "send": "last", "prior_precision": 0.2 * ROWS / rate}
    student = {"rate": rate, "weight_decay": 0.1 / rate}
    method = build_method(tiny(client={"batch_size": 10, "rate_decay": 0.5}, teacher=settings, student=student))
    state = GlobalState(2, method.initial_models())
    result = method.local_update("client-00", state, shard, lambda: False).models
    for role in ("teacher", "student"):
        np.testing.assert_allclose(result[role], 0.975**3 * state.models[role], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_a_cancelled_update_stops_at_once(tiny: Tiny, shard: Shard, every: str) -> None:
    method = build_method(tiny(client={"epochs": 50}, student={"distill_every": every}))
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 2

    with pytest.raises(LocalUpdateCancelled):
        method.local_update("client-00", start_of(method), shard, cancelled)
    assert len(asked) == 3


# ---- server


def updates(method: Method, count: int = 3) -> list[ClientUpdate]:
    generator = np.random.default_rng(0)
    start = method.initial_models()
    return [
        ClientUpdate(
            Receipt(f"client-{number:02d}", 1, 10 * (number + 1)),
            {
                role: vector + generator.normal(0, 0.02, vector.size).astype(np.float32)
                for role, vector in start.items()
            },
        )
        for number in range(count)
    ]


def test_average_weighs_teachers_and_students_by_rows(tiny: Tiny) -> None:
    method = build_method(tiny())
    aggregation = method.aggregation(start_of(method))
    sent = updates(method)
    for one in sent:
        aggregation.fold(one)
    result = aggregation.finish(None).models
    for role in ("teacher", "student"):
        stacked = np.stack([one.models[role].astype(np.float64) for one in sent])
        np.testing.assert_allclose(result[role], np.average(stacked, axis=0, weights=[10, 20, 30]), atol=1e-6)


def test_distill_is_gaussian_ensemble_of_samples_average_and_clients_then_swa(tiny: Tiny, shard: Shard) -> None:
    distill = {"teacher_rate": 0.02, "student_rate": 0.05, "sharpen": 0.5}
    config = tiny(server={"aggregate": "distill", "distill": distill})
    settings = config.server.distill
    method: Any = build_method(config)
    state = start_of(method)
    sent = updates(method)
    aggregation = method.aggregation(state)
    for one in sent:
        aggregation.fold(one)
    result = aggregation.finish(shard).models
    for role in ("teacher", "student"):
        network = method.networks_by_role[role]
        clients = [one.models[role] for one in sent]
        average = np.average(np.stack(clients).astype(np.float64), axis=0, weights=[10, 20, 30]).astype(np.float32)
        samples = gaussian_samples(
            state.models[role], clients, network.layout, settings, generator_for(config.seed, f"gaussian/{role}", 1)
        )
        targets = pseudo_labels(network, [*samples, average, *clients], shard, settings.sharpen)
        rate = settings.teacher_rate if role == "teacher" else settings.student_rate
        stream = generator_for(config.seed, f"distil/{role}", 1)
        expected = distil_ensemble(network, average, targets, shard, at_rate(settings, rate), stream)
        np.testing.assert_allclose(result[role], expected, rtol=1e-4, atol=1e-6)


def test_distill_in_two_threads_gives_the_same_bits_every_time(tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny(server={"aggregate": "distill"}))
    results = []
    for _ in range(2):
        aggregation = method.aggregation(start_of(method))
        for one in updates(method):
            aggregation.fold(one)
        results.append(aggregation.finish(shard).models)
    assert same(results[0], results[1])


def test_ctrl_c_ends_a_distillation_at_once(tiny: Tiny, shard: Shard) -> None:
    method = build_method(tiny(server={"aggregate": "distill", "distill": {"epochs": 100_000}}))  # an hour of it
    aggregation = method.aggregation(start_of(method))
    for one in updates(method):
        aggregation.fold(one)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        aggregation.finish(shard)
    assert time.monotonic() - started < 20


def test_distill_without_a_pool_is_refused(tiny: Tiny) -> None:
    method = build_method(tiny(server={"aggregate": "distill"}))
    aggregation = method.aggregation(start_of(method))
    aggregation.fold(updates(method)[0])
    with pytest.raises(ValueError, match="unlabelled pool"):
        aggregation.finish(None)


def test_averaging_keeps_no_clients_model() -> None:
    """O(model) memory: only distillation needs every client's model."""
    import gc
    import weakref

    from fedppd_ray.config.file import parse_config

    method = build_method(parse_config({}))
    aggregation = method.aggregation(start_of(method))
    sent = updates(method, 1)
    watched = weakref.ref(sent[0].models["student"])
    aggregation.fold(sent[0])
    sent.clear()
    gc.collect()
    assert watched() is None
