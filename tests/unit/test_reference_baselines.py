"""FedAvg, FedPA and FedAvg+SWAG equal their equations, tensor by tensor, on the same random draws (naive.py)."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch

from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.models.flat import Vector
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.store import RunStore
from fedppd_ray.seeding import generator_for
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.server import ServerWorker

Tiny = Callable[..., Config]
RATE, WEIGHT_DECAY = 0.05, 0.02
CLIENT = {"epochs": 3, "batch_size": 9, "rate_decay": 0.8, "augment": "crop_flip"}
NETWORKS = {"teacher": naive.TEACHER, "student": naive.STUDENT}


def config_of(tiny: Tiny, method: str, **changes: Any) -> Config:
    baseline = {"rate": RATE, "weight_decay": WEIGHT_DECAY, **changes.pop("baseline", {})}
    return tiny(method=method, client={**CLIENT, **changes.pop("client", {})}, baseline=baseline, **changes)


def sgd(config: Config, start: Vector, client: str, round_id: int) -> tuple[list[list[naive.Weights]], list[float]]:
    """The reference path of a client in a round."""
    held = Holdings(config, [client]).of(client)
    return naive.sgd_client(
        naive.unpack(start, NETWORKS[config.baseline.network]),
        np.asarray(held.images),
        torch.tensor(np.asarray(held.labels)),
        generator_for(config.seed, "local", round_id, client),
        epochs=config.client.epochs,
        batch_size=config.client.batch_size,
        rate=RATE * config.client.rate_decay ** (round_id - 1),
        momentum=config.baseline.momentum,
        weight_decay=WEIGHT_DECAY,
        augment=config.client.augment == "crop_flip",
    )


def beginning(config: Config, round_id: int) -> GlobalState:
    return GlobalState(round_id - 1, build_method(config).initial_models())


# ---- FedAvg


@pytest.mark.parametrize("network", ["teacher", "student"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_fedavgs_client_runs_sgd_and_begins_every_round_at_rest(tiny: Tiny, network: str, momentum: float) -> None:
    config = config_of(tiny, "fedavg", baseline={"network": network, "momentum": momentum})
    worker, model = ClientWorker(config, ["client-02"]), build_method(config).initial_models()["model"]
    for round_id in (2, 3):  # by the same process: a velocity that outlived a round would show in the second
        update = worker.local_update("client-02", GlobalState(round_id - 1, {"model": model}))
        path, losses = sgd(config, model, "client-02", round_id)
        naive.assert_same(update.models["model"], path[-1][-1], model, f"round {round_id}")
        assert update.receipt.metrics == {"training_loss": pytest.approx(losses[-1], rel=1e-4)}
        model = update.models["model"]


# ---- FedPA


def fedpa_client(config: Config, start: Vector, client: str, round_id: int, burn_in: int, rho: float) -> np.ndarray:
    """θ + Σ̂⁻¹(x̄ − θ), each x the mean of an epoch's iterates after the burn-in."""
    path, _ = sgd(config, start, client, round_id)
    samples = [np.mean([naive.pack(one).astype(np.float64) for one in epoch], axis=0) for epoch in path[burn_in:]]
    return start + naive.posterior_delta(start.astype(np.float64), samples, rho)


@pytest.mark.parametrize(("epochs", "burn_in", "skipped"), [(5, 2, 2), (5, None, 2), (4, None, 2), (3, 0, 0)])
def test_fedpas_client_sends_the_delta_of_its_iterate_averages_after_the_burn_in(
    tiny: Tiny, epochs: int, burn_in: int | None, skipped: int
) -> None:
    rho = 30.0  # much of the covariance: its correction shows
    fedpa = {"burn_in": burn_in, "shrinkage": rho}
    config = config_of(tiny, "fedpa", client={"epochs": epochs}, baseline={"momentum": 0.5}, fedpa=fedpa)
    start = beginning(config, 3)
    sent = ClientWorker(config, ["client-00"]).local_update("client-00", start).models["model"]
    model = start.models["model"]
    expected = fedpa_client(config, model, "client-00", 3, skipped, rho)
    naive.assert_same(sent, expected, model)
    plain = fedpa_client(config, model, "client-00", 3, skipped, 0.0)
    other = fedpa_client(config, model, "client-00", 3, skipped + 1, rho)
    for wrong in (plain, other):
        assert np.linalg.norm(expected - wrong) > 0.02 * np.linalg.norm(expected - model)  # the test can tell


def test_fedpas_server_steps_along_the_weighted_mean_of_the_deltas(tiny: Tiny) -> None:
    config = config_of(tiny, "fedpa", fedpa={"burn_in": 1, "shrinkage": 1.0, "server_rate": 0.6, "start_round": 2})
    start = beginning(config, 2)
    worker, server = ClientWorker(config, client_ids(2)), ServerWorker(config)
    server.install(start)
    server.begin(2)
    deltas = []
    for client, rows in zip(client_ids(2), (10, 30), strict=True):
        update = worker.local_update(client, start)
        server.fold(replace(update, receipt=replace(update.receipt, rows=rows)))
        deltas.append(fedpa_client(config, start.models["model"], client, 2, 1, 1.0) - start.models["model"])
    server.finish()
    expected = start.models["model"] + 0.6 * (0.25 * deltas[0] + 0.75 * deltas[1])
    naive.assert_same(server.state().models["model"], expected, start.models["model"])


# ---- FedAvg + SWAG


def moments(snapshots: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, variance and the last deviations from the running mean of a client's snapshots."""
    stacked = np.stack(snapshots).astype(np.float64)
    running = [stacked[: k + 1].mean(0) for k in range(len(stacked))]
    deviations = np.stack([row - mean for row, mean in zip(stacked, running, strict=True)])[-rank:]
    return stacked.mean(0), stacked.var(0), deviations


def test_swags_last_round_is_a_gaussian_of_the_epochs_ends_mixed_by_rows(
    tiny: Tiny, train_run: Callable[..., Any], tmp_path: Path
) -> None:
    """Through a whole run of one round: what is in the state, what is exported, and how the mixture predicts."""
    config = config_of(
        tiny,
        "fedswag",
        client={"epochs": 4},
        baseline={"momentum": 0.5},
        fedswag={"rank": 3, "samples": 3},
        federation={"rounds": 1, "clients": 2},
    )
    train_run(config, tmp_path / "run")
    state = RunStore(tmp_path / "run").latest()
    start = beginning(config, 1).models["model"]
    clients = []
    ends = []
    for client in client_ids(2):
        path, _ = sgd(config, start, client, 1)
        clients.append(moments([naive.pack(epoch[-1]) for epoch in path], 3))
        ends.append(naive.pack(path[-1][-1]))
    mean = (clients[0][0] + clients[1][0]) / 2
    naive.assert_same(read_student(tmp_path / "run")[1].export(), mean, start, "exported")
    naive.assert_same(state.models["model"], (ends[0] + ends[1]) / 2, start, "fedavg's")
    assert np.linalg.norm(mean - state.models["model"]) > 0.05 * np.linalg.norm(mean - start)  # the test can tell

    variance = sum((own[1] + (own[0] - mean) ** 2) / 2 for own in clients)
    factors = [row * math.sqrt(0.5 / 2) for own in clients for row in own[2]]
    between = [(own[0] - mean) * math.sqrt(0.5) for own in clients]
    factors = [*factors[:3], between[0], *factors[3:], between[1]]  # the order of the draws
    method = build_method(config)
    images = np.asarray(Holdings(config, ["client-00"]).of("client-00").images)
    total = 0
    for sample in range(3):
        generator = generator_for(config.seed, f"swag/{sample}")
        z1 = torch.empty(mean.size).normal_(generator=generator).double().numpy()
        z2 = torch.empty(len(factors)).normal_(generator=generator).double().numpy()
        drawn = mean + math.sqrt(0.5) * (np.sqrt(variance) * z1 + z2 @ np.stack(factors))
        total = total + torch.softmax(naive.logits(naive.unpack(drawn, naive.TEACHER), naive.normalised(images)), 1)
    answer = method.predictor(state.models)(naive.normalised(images))
    torch.testing.assert_close(answer.exp().float(), total / 3, rtol=1e-3, atol=1e-5)


def test_swag_before_the_last_round_is_fedavg(tiny: Tiny) -> None:
    config = config_of(tiny, "fedswag", baseline={"momentum": 0.5}, federation={"rounds": 3})
    for round_id, roles in ((2, 1), (3, 4)):
        start = beginning(config, round_id)
        sent = ClientWorker(config, ["client-00"]).local_update("client-00", start).models
        path, _ = sgd(config, start.models["model"], "client-00", round_id)
        naive.assert_same(sent["model"], path[-1][-1], start.models["model"])
        assert len(sent) == roles
