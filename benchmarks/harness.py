"""What the benchmarks share: rows, configs, plain processes to compare with, and how a result is shown and saved."""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from fedppd_ray.config.file import parse_config  # noqa: E402
from fedppd_ray.config.schema import Config, client_ids  # noqa: E402
from fedppd_ray.data.catalog import CATALOG  # noqa: E402
from fedppd_ray.data.datasets import prepare  # noqa: E402
from fedppd_ray.data.folder import write_folder  # noqa: E402
from fedppd_ray.data.holdings import Holdings  # noqa: E402
from fedppd_ray.data.parts import Split  # noqa: E402
from fedppd_ray.data.rows import ImageShard  # noqa: E402
from fedppd_ray.errors import DataError  # noqa: E402
from fedppd_ray.federation.observer import Observer  # noqa: E402
from fedppd_ray.federation.types import GlobalState  # noqa: E402
from fedppd_ray.methods import build_method  # noqa: E402
from fedppd_ray.runs.store import RunStore  # noqa: E402
from fedppd_ray.runs.training import Training  # noqa: E402

CIFAR = CATALOG["cifar10"]
NEVER = 10**6  # rounds between two evaluations
EDGES = 2  # rounds that do not count: the first warms up, the last one evaluates


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Every benchmark has a short version, and can leave its figures for others to read."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="smaller and fewer: a minute or so, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn_of_company() -> None:
    """Where other processes want the cores too, who has more processes gets more of them: ratios mean little."""
    load = os.getloadavg()[0]
    if load > 0.5 * cores():
        print(f"load average {load:.1f} on {cores()} cores: other work is running, take no ratio at its word\n")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def report(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps({"cores": cores(), **result}, indent=2) + "\n", encoding="utf-8")
        print(f"\nwritten to {file}")


# --- rows and configs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """The `data` section of a config, and what its rows are."""

    section: dict[str, Any]
    what: str


@contextmanager
def cifar_rows(count: int) -> Iterator[Rows]:
    """CIFAR-10 from the data root; where it is not, random images of its shape, which are as much work."""
    try:
        prepare("cifar10")
        yield Rows({"name": "cifar10"}, "CIFAR-10")
        return
    except DataError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)

        def split(rows: int) -> Split:
            images = generator.integers(0, 256, (rows, *CIFAR.shape), np.uint8)
            return Split(images, generator.integers(0, len(CIFAR.classes), rows))

        write_folder(Path(folder), CIFAR, split(count), split(1000))
        facts = {key: getattr(CIFAR, key) for key in ("classes", "shape", "mean", "std")}
        facts["networks"] = [CIFAR.network(role) for role in ("teacher", "student")]
        yield Rows({"name": "folder", "root": folder, "folder": facts}, "random images shaped like CIFAR-10")


def fedavg_config(data: Rows, clients: int, rows: int, rounds: int, **more: Any) -> Config:
    """One local epoch of FedAvg on the paper's CIFAR-10 teacher (a LeNet), rows dealt out evenly."""
    return parse_config(
        {
            "name": "benchmark",
            "method": "fedavg",
            "data": {**data.section, "partition": {"kind": "iid", "rows_per_client": rows}},
            "federation": {"clients": clients, "rounds": rounds},
            "client": {"epochs": 1, "batch_size": 40},
            "teacher": {"network": "cifar10_teacher"},
            "evaluation": {"every": NEVER, "ood": None},
            **more,
        }
    )


# --- the same work without Ray ---------------------------------------------------------------------------------


def _plain_clients(config: Config, clients: Sequence[str], pipe: Connection) -> None:
    """Local updates of these clients, one after the other, whenever a state comes through the pipe."""
    torch.set_num_threads(1)
    holdings, method = Holdings(config, clients), build_method(config)
    splits = {client: holdings.of(client) for client in clients}
    shards = {client: ImageShard(split.images, split.labels, config.dataset) for client, split in splits.items()}
    pipe.send(GlobalState(0, method.initial_models()))
    while (state := pipe.recv()) is not None:
        began = time.perf_counter()
        for client, shard in shards.items():
            method.local_update(client, state, shard, lambda: False)
        pipe.send(time.perf_counter() - began)


class PlainProcesses:
    """A process per core, the clients dealt out among them: their updates alone, nothing sent and nothing averaged."""

    def __init__(self, config: Config) -> None:
        clients, context = client_ids(config.federation.clients), multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for core in range(cores()):
            pipe, theirs = context.Pipe()
            arguments = (config, clients[core :: cores()], theirs)
            context.Process(target=_plain_clients, args=arguments, daemon=True).start()
            self._pipes.append(pipe)
        self._state, *_ = [pipe.recv() for pipe in self._pipes]  # all have loaded their rows

    def turn(self) -> float:
        """All clients once: seconds of compute, summed over the processes, by the number of cores."""
        for pipe in self._pipes:
            pipe.send(self._state)
        return sum(float(pipe.recv()) for pipe in self._pipes) / len(self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


@contextmanager
def local_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def raylets(count: int) -> Iterator[None]:
    """A Ray cluster of that many nodes with a core each, all on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


class Silent(Observer):
    """An observer that says nothing; the benchmarks' own begin here."""

    def client_failed(self, failure: Any, action: Any) -> None:
        raise RuntimeError(f"a client failed, so the figures mean nothing: {failure} {action}")

    def server_lost(self, round_id: int, reason: str) -> None:
        raise RuntimeError(f"round {round_id}: the server died, so the figures mean nothing: {reason}")


@dataclass(frozen=True)
class Turn:
    """One round on Ray and, right after it, the same work in plain processes. Seconds."""

    round: float
    saving: float  # of the round: what came after its checkpoint's clock stopped
    compute: tuple[float, ...]  # of each client, by its actor's clock
    driver: float  # CPU of this process
    plain: float  # 0 where nobody asked


class _Turns(Silent):
    def __init__(self, plain: PlainProcesses | None) -> None:
        self._plain = plain
        self.turns: list[Turn] = []

    def round_started(self, *_: Any) -> None:
        self._compute: list[float] = []
        self._began, self._spent = time.monotonic(), time.process_time()

    def client_done(self, receipt: Any) -> None:
        self._compute.append(receipt.metrics["seconds"])

    def round_finished(self, record: dict[str, Any]) -> None:
        seconds, spent = time.monotonic() - self._began, time.process_time() - self._spent
        saving = seconds - record["seconds"]
        self.turns.append(
            Turn(seconds, saving, tuple(self._compute), spent, self._plain.turn() if self._plain else 0.0)
        )


def turns_beside(config: Config) -> list[Turn]:
    """Rounds on a Ray of its own, each followed by the same work in plain processes."""
    plain = PlainProcesses(config)
    turns = turns_on(local_ray(), config, plain)
    plain.close()
    return turns


def turns_on(cluster: AbstractContextManager[None], config: Config, plain: PlainProcesses | None = None) -> list[Turn]:
    """The rounds of a training there but the first, which warms up, and the last, which evaluates."""
    from fedppd_ray.runtime.ray_executor import RayExecutor

    observer = _Turns(plain)
    with cluster, tempfile.TemporaryDirectory() as folder:
        executor = RayExecutor(config, client_ids(config.federation.clients))
        store = RunStore(Path(folder) / "run")
        store.create(config)
        Training(config, store, executor, observer).run_rounds(None)
        executor.close()
    return observer.turns[1:-1]
