"""Starts or joins Ray, and runs a training on it."""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import ray

from fedppd_ray.checkpoint.remote import Location, open_to_train
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.config import Config, client_ids
from fedppd_ray.core.executor import Executor, SerialExecutor
from fedppd_ray.core.types import GlobalState
from fedppd_ray.errors import ResourceError
from fedppd_ray.runtime.gauges import GaugeObserver
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.training import Observer, Observers, Training

_CONNECT_S = 10.0


def train(
    config: Config,
    out: Location,
    observer: Observer,
    *,
    resume: bool = False,
    resume_if_exists: bool = False,
    address: str | None = None,
    serial: bool = False,
    ranked_by: Sequence[GlobalState] = (),
) -> None:
    """A run from its first, or its last saved, round to the end; `out` is a folder or a URL.

    `ranked_by`, active learning: the global models by which the clients have chosen rows to label, in order.
    """
    with open_to_train(out) as run:
        store = RunStore(run.folder, run.mirror)
        if resume or (resume_if_exists and store.exists()):
            start = store.resume(config)
        else:
            store.create(config)
            start = None
        if start is not None and start.round == config.federation.rounds:
            return
        with _executor(config, address, serial, ranked_by) as executor:
            watching = observer if serial else Observers(observer, GaugeObserver())
            Training(config, store, executor, watching).run_rounds(start)


@contextmanager
def _executor(
    config: Config, address: str | None, serial: bool, ranked_by: Sequence[GlobalState]
) -> Iterator[Executor]:
    clients = client_ids(config.federation.clients)
    _stop_on_sigterm()
    if serial:
        yield SerialExecutor(config, clients, ranked_by)
        return
    connect(address)
    _stop_on_sigterm()  # again: ray.init puts a handler of its own there, which ends the process at once
    try:
        executor = RayExecutor(config, clients, ranked_by)
        try:
            yield executor
        finally:
            executor.close()
    finally:
        ray.shutdown()


def _stop_on_sigterm() -> None:
    """`ray job stop`, Kubernetes and service managers ask by SIGTERM: the same clean stop as Ctrl-C."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def connect(address: str | None) -> None:
    """Join the cluster at `address` or $RAY_ADDRESS (a job's driver has it); else start one of our own."""
    target = address or os.environ.get("RAY_ADDRESS")
    if target:
        _require_listener(target)
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


def _require_listener(address: str) -> None:
    """Fail at once where nobody listens: Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return  # "auto" and the like: Ray knows where to look
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ResourceError(f"no Ray cluster at {address}: {error}; start one, or mend --address") from None
