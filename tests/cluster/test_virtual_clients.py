"""A thousand clients that share two actors."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import client_ids
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.workers.serial import SerialExecutor
from tests.runtime.conftest import Recorder, run

CLIENTS = 1000


@pytest.fixture
def two_cores() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def many(clients: int) -> Any:
    return parse_config(
        {
            "data": {"name": "mnist5k", "calibration": 100, "partition": {"kind": "iid", "rows_per_client": 3}},
            "federation": {"clients": clients, "rounds": 1},
            "client": {"epochs": 1},
            "resources": {"actors": 2},
        }
    )


def own_megabytes(actor: Any) -> float:
    """Memory of its own: without pages of the object store, where updates wait that came out of order."""

    def measure(_self: object) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

    return float(ray.get(actor.__ray_call__.remote(measure)))


@pytest.mark.usefixtures("two_cores")
def test_a_thousand_clients_share_two_actors_and_the_server_does_not_grow_with_them(tmp_path):
    config = many(CLIENTS)
    executor = RayExecutor(config, client_ids(CLIENTS))
    sizes: dict[int, float] = {}
    done: list[str] = []

    def watch(receipt: Any) -> None:
        done.append(receipt.client)
        if len(done) in (100, CLIENTS):
            sizes[len(done)] = own_megabytes(executor.server.handle)

    observer = Recorder(on_client=watch)
    run(config, tmp_path / "run", executor, observer)
    assert observer.records[0]["clients"] == CLIENTS
    assert len(set(done)) == CLIENTS
    # The updates in between are 387 MB (900 × 107,510 float32); the server may keep none of them, but its allocator
    # keeps up to 64 MB that were freed.
    assert sizes[CLIENTS] - sizes[100] < 90
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    assert sizes[CLIENTS] < total / 4


@pytest.mark.usefixtures("two_cores")
def test_clients_that_share_actors_compute_the_same_bits(tmp_path):
    config = many(7)
    shared = run(config, tmp_path / "ray", RayExecutor(config, client_ids(7)), Recorder())
    alone = run(config, tmp_path / "serial", SerialExecutor(config, client_ids(7)), Recorder())
    for role in shared.models:
        assert shared.models[role].tobytes() == alone.models[role].tobytes()
