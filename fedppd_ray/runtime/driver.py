"""Starts or joins Ray, and runs a training on it."""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import ray

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ConfigError, ResourceError
from fedppd_ray.federation.executor import Executor
from fedppd_ray.federation.observer import Observer, Observers
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.models.networks import check_networks
from fedppd_ray.runs.journal import note_start
from fedppd_ray.runs.remote import Location, absolute, open_to_train
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.runtime.gauges import GaugeObserver
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.runtime.site_actors import RayBox
from fedppd_ray.sites.coordinator import Listen, SiteObserver, open_door, options_of, run_id, wait_for_sites
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.mailbox import Box, Mailbox
from fedppd_ray.sites.pool import SiteExecutor
from fedppd_ray.sites.work import told_config
from fedppd_ray.workers.serial import SerialExecutor

log = logging.getLogger("fedppd")
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
    acquisition_states: Sequence[GlobalState] = (),
    listen: Listen | None = None,
    command: str | None = None,
) -> None:
    """A run from its first, or its last saved, round to the end; `out` is a folder or a URL.

    `listen`: where sites join, if some clients are sites. `acquisition_states`, active learning: the global models by
    which the clients have chosen rows to label, in order. `command`: the command line, for the run's journal.
    """
    check_networks(config)
    _check_door(config, listen)
    try:
        with open_to_train(out) as run:
            store = RunStore(run.folder, run.mirror)
            if resume:
                store.require_run()  # before the lock, which would make its folder
            with store.locked():
                start = _start(config, store, resume or (resume_if_exists and store.exists()))
                if start is not None and start.round >= config.federation.rounds:
                    log.info("all %d rounds are done; a higher federation.rounds goes on", start.round)
                else:
                    options = options_of(address, serial, listen)
                    run.push([note_start(run.folder, command, options, start.round + 1 if start else 1)])
                    with _executor(
                        config, address, serial, acquisition_states, _run_of(config, out, listen)
                    ) as executor:
                        watching = [observer] if serial else [observer, GaugeObserver()]
                        with _door(config, listen, executor, store.folder) as others:
                            Training(config, store, executor, Observers(*watching, *others)).run_rounds(start)
    except BaseException as error:
        observer.run_failed(error)
        raise
    observer.run_finished()


def _start(config: Config, store: RunStore, resume: bool) -> GlobalState | None:
    if resume:
        return store.resume(config)
    store.create(config)
    return None


def _check_door(config: Config, listen: Listen | None) -> None:
    sites = config.sites()
    if sites and listen is None:
        client, site = next(iter(sites.items()))
        raise ConfigError(f"clients.{client}.site: {site} joins over HTTPS; say where, with --listen HOST:PORT")
    if listen is not None and not sites:
        raise ConfigError("--listen: no client is a site; name one, as clients: {client-00: {site: hospital-a}}")


def _run_of(config: Config, out: Location, listen: Listen | None) -> str:
    return run_id(config, absolute(out), Guests(listen.guests).key()) if listen else ""


@contextmanager
def _door(config: Config, listen: Listen | None, executor: Executor, folder: Path) -> Iterator[list[Observer]]:
    """Open to sites until the run is over; begins when enough are there. Yields who else watches the run then."""
    if listen is None:
        yield []
        return
    guests = Guests(listen.guests)
    if isinstance(executor, SiteExecutor):
        boxes: dict[str, Box] = {box.site: box for box in executor.boxes.values()}
    elif isinstance(executor, RayExecutor):
        boxes = {site: RayBox(handle) for site, handle in executor.hosts.site_handles().items()}
    with open_door(listen, guests, boxes, folder) as gateway:
        wait_for_sites(config, lambda: gateway.heard)
        yield [SiteObserver(folder, guests.key(), config.sites())]


@contextmanager
def _executor(
    config: Config, address: str | None, serial: bool, acquisition_states: Sequence[GlobalState], run: str
) -> Iterator[Executor]:
    clients = config.client_names
    _stop_on_sigterm()
    if serial and run:
        patience = config.resources.start_timeout_s
        told = told_config(config)
        yield SiteExecutor(config, {c: Mailbox(s, c, run, told, patience) for c, s in config.sites().items()})
        return
    if serial:
        yield SerialExecutor(config, clients, acquisition_states)
        return
    connect(address)
    _stop_on_sigterm()  # again: ray.init puts a handler of its own there, which ends the process at once
    try:
        executor = RayExecutor(config, clients, acquisition_states, run)
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
