"""Small real things that many tests share: a configuration of seconds, an observer that remembers, a finished run."""

import copy
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command, Done

# One set of kernels on every machine that has AVX2, so that pinned bits can be checked; read when torch is imported.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
import torch

from fedppd_ray.cli.app import main
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.config.stored import restricted
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import ClientInfo, Failure, GlobalState, Receipt
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.workers.serial import SerialExecutor

torch.set_num_threads(1)

_TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {
        "name": "mnist5k",
        "server_pool": 30,
        "calibration": 40,
        "partition": {"kind": "iid", "rows_per_client": 24},
    },
    "federation": {"clients": 3, "rounds": 3},
    "client": {"epochs": 1, "batch_size": 12},
    "server": {"distill": {"epochs": 1, "batch_size": 15, "samples": 2}},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


class Watcher(Observer):
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.done: list[Receipt] = []
        self.failed: list[tuple[Failure, Action]] = []
        self.records: list[dict[str, Any]] = []
        self.selected: list[list[str]] = []
        self.lost: list[int] = []

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        self.first_round = first_round

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        self.selected.append(list(selected))

    def client_done(self, receipt: Receipt) -> None:
        self.done.append(receipt)

    def client_failed(self, failure: Failure, action: Action) -> None:
        self.failed.append((failure, action))

    def server_lost(self, round_id: int, reason: str) -> None:
        self.lost.append(round_id)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Config]:
    """A configuration that trains in a fraction of a second, with changes by section.

    The base has settings for every method; each takes what it reads, as in a comparison.
    """

    def make(**changes: Any) -> Config:
        values = merged(_TINY, changes)
        return parse_config(restricted(values, values.get("method", "fedppd")))

    return make


def study_values(**changes: Any) -> dict[str, Any]:
    """The tiny configuration as a study's file holds it: what other methods read is under `compare`."""
    values = copy.deepcopy(merged(_TINY, changes))
    values["compare"] = {"data": {"server_pool": values["data"].pop("server_pool")}, "server": values.pop("server")}
    return values


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture(scope="session")
def train_run() -> Callable[..., Watcher]:
    """Run (or resume) a training without Ray in a folder."""

    def run(
        config: Config, folder: Path, resume: bool = False, acquisition_states: Sequence[GlobalState] = ()
    ) -> Watcher:
        observer, store = Watcher(), RunStore(folder)
        if not resume:
            store.create(config)
        start = store.resume(config) if resume else None
        executor = SerialExecutor(config, client_ids(config.federation.clients), acquisition_states)
        Training(config, store, executor, observer).run_rounds(start)
        return observer

    return run


@pytest.fixture(scope="session")
def finished_run(
    tiny: Callable[..., Config], train_run: Callable[..., Watcher], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run folder to read from; never write into it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_run(tiny(federation={"rounds": 2}), folder)
    return folder


@pytest.fixture(scope="session")
def student_digest(train_run: Callable[..., Watcher]) -> Callable[[dict[str, Any], dict[str, Any], Path], str]:
    """Train without Ray by two dictionaries of settings; sha256 of the exported student's vector.

    With an `active` section: a second training, on what the clients label after the first.
    """

    def digest(base: dict[str, Any], settings: dict[str, Any], folder: Path) -> str:
        config = parse_config(merged(base, settings))
        train_run(config, folder / "run")
        last = folder / "run"
        if config.active:
            train_run(config, folder / "step", acquisition_states=[RunStore(last).latest()])
            last = folder / "step"
        return hashlib.sha256(read_student(last)[1].export().tobytes()).hexdigest()

    return digest


@pytest.fixture(scope="session")
def raw_info() -> DatasetInfo:
    """A data set whose normalised inputs are the pixels themselves."""
    return DatasetInfo("raw", tuple("abcd"), (1, 6, 6), (0.0,), (1 / 255,), "none")


@pytest.fixture(scope="session")
def pool(raw_info: DatasetInfo) -> Shard:
    """37 unlabelled noise images of small pixel values."""
    images = np.random.default_rng(5).integers(0, 4, (37, 1, 6, 6)).astype(np.uint8)
    return ImageShard(images, None, raw_info)


@pytest.fixture
def fedppd(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in this process, as the console script does."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedppd", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run
