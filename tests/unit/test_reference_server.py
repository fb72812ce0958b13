"""The server distils in FedPPD and FedBE as the equations say, tensor by tensor, on the same draws (naive.py)."""

from collections.abc import Callable
from typing import Any

import naive
import numpy as np
import pytest

from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import dataset_of, partition_of
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.methods import build_method
from fedppd_ray.models.flat import Vector
from fedppd_ray.seeding import generator_for
from fedppd_ray.workers.server import ServerWorker

Tiny = Callable[..., Config]
ROUND = 4
ROWS = (5, 10, 60)  # of the clients: a plain mean is far from the weighted one

DISTILL: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 8,
    "teacher_rate": 0.02,
    "student_rate": 0.035,
    "samples": 2,
    "spread": 0.8,
    "scale": 1.3,
    "min_variance": 1e-5,
    "sharpen": 1.0,
    "divide_by_classes": False,
    "momentum": 0.8,
    "weight_decay": 0.01,
    "swa_start": 4,
    "swa_every": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "sharpened, divided, no momentum": {"sharpen": 0.5, "divide_by_classes": True, "momentum": 0.0},
    "without samples, averaged from half-way": {"samples": 0, "swa_start": 500, "swa_every": 1},
    "averaged from the first step": {"swa_start": 0, "swa_every": 5},
}


def sent_by_clients(start: Vector, role: int) -> list[Vector]:
    """Models that went far from the start, to different sides: they disagree about the pool."""
    generator = np.random.default_rng(role)
    scale = 0.6 * start.std()
    return [
        (start * np.float32(1 + 0.4 * k) + scale * generator.normal(size=start.size)).astype(np.float32)
        for k in range(len(ROWS))
    ]


def server_update(config: Config, start: GlobalState, sent: dict[str, list[Vector]]) -> dict[str, Vector]:
    server = ServerWorker(config)
    server.install(start)
    server.begin(ROUND)
    for k, rows in enumerate(ROWS):
        models = {role: vectors[k] for role, vectors in sent.items()}
        server.fold(ClientUpdate(Receipt(f"client-{k:02d}", ROUND, rows), models))
    server.finish()
    assert server.state().round == ROUND
    return dict(server.state().models)


def reference(
    config: Config, role: str, of: Any, start: Vector, sent: list[Vector], rate: float, distill: dict[str, Any]
) -> Any:
    train = dataset_of(config).train
    pool = np.asarray(train.images[partition_of(config, train).server_pool])
    assert len(pool) == 30
    return naive.distillation(
        naive.unpack(start, of),
        [naive.unpack(vector, of) for vector in sent],
        ROWS,
        pool,
        rate,
        distill,
        generator_for(config.seed, f"gaussian/{role}", ROUND),
        generator_for(config.seed, f"distil/{role}", ROUND),
    )


@pytest.mark.parametrize("case", CASES)
def test_fedppds_server_distils_teachers_and_students_as_the_equations_say(case: str, tiny: Tiny) -> None:
    distill = {**DISTILL, **CASES[case]}
    config = tiny(server={"aggregate": "distill", "distill": distill})
    start = GlobalState(ROUND - 1, build_method(config).initial_models())
    sent = {role: sent_by_clients(vector, k) for k, (role, vector) in enumerate(start.models.items())}
    result = server_update(config, start, sent)
    for role, of in (("teacher", naive.TEACHER), ("student", naive.STUDENT)):
        expected = reference(config, role, of, start.models[role], sent[role], distill[f"{role}_rate"], distill)
        mean = np.average(np.stack(sent[role]).astype(np.float64), axis=0, weights=ROWS)
        naive.assert_same(result[role], expected, mean, role)


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_fedbes_server_distils_its_one_model_as_the_equations_say(network: str, tiny: Tiny) -> None:
    config = tiny(method="fedbe", baseline={"network": network, "rate": 0.02}, server={"distill": DISTILL})
    start = GlobalState(ROUND - 1, build_method(config).initial_models())
    sent = sent_by_clients(start.models["model"], 2)
    result = server_update(config, start, {"model": sent})["model"]
    of = naive.TEACHER if network == "teacher" else naive.STUDENT
    rate = DISTILL[f"{network}_rate"]
    expected = reference(config, "model", of, start.models["model"], sent, rate, DISTILL)
    mean = np.average(np.stack(sent).astype(np.float64), axis=0, weights=ROWS)
    naive.assert_same(result, expected, mean, "model")


@pytest.mark.parametrize("method", ["fedppd", "fedavg"])
def test_an_averaging_server_takes_the_mean_weighted_by_rows(method: str, tiny: Tiny) -> None:
    config = tiny(method=method)
    start = GlobalState(ROUND - 1, build_method(config).initial_models())
    sent = {role: sent_by_clients(vector, k) for k, (role, vector) in enumerate(start.models.items())}
    result = server_update(config, start, sent)
    assert set(result) == set(sent)
    for role, vectors in sent.items():
        wanted = sum(n * vector.astype(np.float64) for n, vector in zip(ROWS, vectors, strict=True)) / sum(ROWS)
        np.testing.assert_allclose(result[role], wanted, rtol=1e-6, atol=1e-8)
