"""Real Ray, started once for this folder; a run small enough to repeat."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.runtime.ray_executor import RayExecutor

TINY = {
    "name": "tiny",
    "data": {
        "name": "mnist5k",
        "calibration": 50,
        "partition": {"kind": "iid", "rows_per_client": 48},
    },
    "federation": {"clients": 3, "rounds": 2},
    "client": {"epochs": 1},
}


def tiny_config(**changes: Any) -> Config:
    """TINY with some keys changed: tiny_config(federation__rounds=3)."""
    values: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return parse_config(values)


class Recorder(Observer):
    """An observer that remembers."""

    def __init__(self, on_round: Any = None, on_client: Any = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.failures: list[tuple[str, str, str]] = []
        self.servers_lost: list[int] = []
        self._on_round = on_round or (lambda _round: None)
        self._on_client = on_client or (lambda _receipt: None)

    def run_started(self, config: Any, first_round: int, clients: Any) -> None:
        self.clients = clients

    def round_started(self, round_id: int, selected: Any) -> None:
        self._on_round(round_id)

    def client_done(self, receipt: Any) -> None:
        self._on_client(receipt)

    def client_failed(self, failure: Any, action: Any) -> None:
        self.failures.append((failure.client, failure.reason, action.value))

    def server_lost(self, round_id: int, reason: str) -> None:
        self.servers_lost.append(round_id)

    def round_finished(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def run(config: Config, folder: Path, executor: Any, observer: Recorder) -> GlobalState:
    store = RunStore(folder)
    store.create(config)
    Training(config, store, executor, observer).run_rounds(None)
    return store.latest()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def ray_executor(ray_cluster: None) -> Iterator[Any]:  # noqa: ARG001
    made: list[RayExecutor] = []

    def make(config: Config) -> RayExecutor:
        made.append(RayExecutor(config, client_ids(config.federation.clients)))
        return made[-1]

    yield make
    for executor in made:
        executor.close()
