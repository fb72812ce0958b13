"""Starts or joins Ray, and runs a training on it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from fedppd_ray.checkpoint.remote import Location, open_to_train
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.config import Config, client_ids
from fedppd_ray.core.executor import Executor, SerialExecutor
from fedppd_ray.errors import ResourceError
from fedppd_ray.runtime.gauges import GaugeObserver
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.training import Observer, Observers, Training


def train(
    config: Config,
    out: Location,
    observer: Observer,
    *,
    resume: bool = False,
    resume_if_exists: bool = False,
    address: str | None = None,
    serial: bool = False,
) -> None:
    """A run from its first, or its last saved, round to the end; `out` is a folder or a URL."""
    with open_to_train(out) as run:
        store = RunStore(run.folder, run.mirror)
        if resume or (resume_if_exists and store.exists()):
            start = store.resume(config)
        else:
            store.create(config)
            start = None
        if start is not None and start.round == config.federation.rounds:
            return
        with _executor(config, address, serial) as executor:
            watching = observer if serial else Observers(observer, GaugeObserver())
            Training(config, store, executor, watching).run_rounds(start)


@contextmanager
def _executor(config: Config, address: str | None, serial: bool) -> Iterator[Executor]:
    clients = client_ids(config.federation.clients)
    if serial:
        yield SerialExecutor(config, clients)
        return
    connect(address)
    try:
        executor = RayExecutor(config, clients)
        try:
            yield executor
        finally:
            executor.close()
    finally:
        ray.shutdown()


def connect(address: str | None) -> None:
    """Join the cluster at `address` or $RAY_ADDRESS (a job's driver has it); else start one of our own."""
    target = address or os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if target:
            ray.init(address=target, **quiet)
        else:
            # Ray turns token authentication on for a cluster that it starts; RAY_AUTH_MODE, where set, decides.
            ray.init(address="local", include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ResourceError(f"no Ray cluster at {target or 'this machine'}: {reason}") from None
