"""The coordinator's side of a run with sites: opens the door, waits until enough are there, closes it when all know.

Who holds the mailboxes is not its business: this process (`pool`), or actors in a Ray cluster (`runtime.site_actors`).
"""

import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedppd_ray.config.identity import config_hash
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import Receipt
from fedppd_ray.runs.files import sha256
from fedppd_ray.runs.layout import SITE_FIGURES
from fedppd_ray.runs.signature import Key, sign_export
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.mailbox import Box
from fedppd_ray.sites.work import FIGURE

if TYPE_CHECKING:  # a web server takes a fifth of a second to import, and most runs have no door
    import uvicorn

    from fedppd_ray.sites.gateway import Gateway

log = logging.getLogger("fedppd")
_LOOK_S = 0.2
_LINGER_S = 30.0  # at the end, for sites to hear of it and fetch the student
_ALIVE_S = 15.0  # longer than a question waits


@dataclass(frozen=True)
class Listen:
    """Where the coordinator's door is, and which folder holds its key and its guests."""

    host: str
    port: int
    certificate: Path
    key: Path
    guests: Path
    client_authority: Path | None = None  # mutual TLS: who has no certificate of it cannot even speak


def parse_listen(
    address: str, certificate: Path | None, key: Path | None, guests: Path, client_authority: Path | None = None
) -> Listen:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen {address}: write HOST:PORT, for example 0.0.0.0:8443")
    if certificate is None or key is None:
        raise ConfigError("--listen: sites are spoken to over HTTPS only; give --tls-cert and --tls-key")
    files = {"--tls-cert": certificate, "--tls-key": key, "--tls-client-ca": client_authority}
    for option, path in files.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: no such file")
    return Listen(host.strip("[]"), int(port), certificate, key, guests, client_authority)


def options_of(address: str | None, serial: bool, listen: Listen | None) -> dict[str, Any]:
    """How a process works on a run, as the run's journal keeps it for the one that goes on."""
    door = {} if listen is None else {key: _kept(value) for key, value in asdict(listen).items()}
    return {"address": address, "serial": serial, "listen": door or None}


def listen_again(door: Mapping[str, Any]) -> Listen:
    """The same door once more."""
    paths = {key: Path(door[key]) for key in ("certificate", "key", "guests")}
    authority = door.get("client_authority")
    return Listen(str(door["host"]), int(door["port"]), **paths, client_authority=authority and Path(authority))


def _kept(value: object) -> object:
    return str(value.absolute()) if isinstance(value, Path) else value


def run_id(config: Config, out: str, key: Key) -> str:
    """The same for a run that is resumed; another one for every other run."""
    return sha256(f"fedppd-run-1\n{key.public}\n{config.name}\n{config_hash(config)}\n{out}".encode())[:32]


@contextlib.contextmanager
def open_door(listen: Listen, guests: Guests, boxes: Mapping[str, Box], export: Path | None) -> Iterator["Gateway"]:
    """A gateway that is reachable; at the end sites are told, and given a moment."""
    from fedppd_ray.sites.gateway import Gateway

    gateway = Gateway(guests, boxes, export)
    server, thread = _serve(gateway, listen)
    log.info(
        "sites are welcome at https://%s:%d; this coordinator's key is %s",
        listen.host,
        listen.port,
        guests.key().public,
    )
    try:
        yield gateway
        gateway.finished.set()
        _linger(gateway)
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(timeout=10)


def _serve(gateway: "Gateway", listen: Listen) -> "tuple[uvicorn.Server, threading.Thread]":
    import uvicorn

    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        sock = socket.create_server((listen.host, listen.port), family=family, backlog=256)
    except OSError as error:
        raise ConfigError(f"--listen {listen.host}:{listen.port}: {error.strerror}; choose another") from None
    config = uvicorn.Config(
        gateway.app,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
        ssl_ca_certs=None if listen.client_authority is None else str(listen.client_authority),
        ssl_cert_reqs=ssl.CERT_NONE if listen.client_authority is None else ssl.CERT_REQUIRED,
        log_level="error",
        access_log=False,
        timeout_keep_alive=30,
        server_header=False,
        lifespan="off",
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"--tls-cert, --tls-key, --tls-client-ca: cannot be used ({error})") from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="gateway", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    return server, thread


def _linger(gateway: "Gateway") -> None:
    limit = time.monotonic() + _LINGER_S
    while time.monotonic() < limit:
        alive = {site for site, when in gateway.heard.items() if time.monotonic() - when < _ALIVE_S}
        if alive <= gateway.gone:
            return
        time.sleep(_LOOK_S)


def wait_for_sites(config: Config, heard: Callable[[], Mapping[str, float]]) -> None:
    """Until all are there; or, after `resources.start_timeout_s`, until enough for a quorum are."""
    sites = set(config.sites().values())
    others = config.federation.clients - len(sites)
    needed = FailurePolicy(0, config.federation.quorum).needed(config.federation.clients)
    patience = time.monotonic() + config.resources.start_timeout_s
    shown: set[str] | None = None
    while True:
        here = sites & set(heard())
        if here != shown:
            missing = ", ".join(sorted(sites - here))
            log.info("sites here: %s%s", ", ".join(sorted(here)) or "none", f"; not yet: {missing}" if missing else "")
            shown = here
        if here == sites or (time.monotonic() > patience and others + len(here) >= needed):
            return
        time.sleep(_LOOK_S)


class SiteObserver(Observer):
    """Signs every export, and keeps what sites tell of the student on rows of their own."""

    def __init__(self, folder: Path, key: Key, sites: Mapping[str, str]) -> None:
        self._folder, self._key, self._sites = folder, key, sites

    def exported(self, round_id: int, card: Mapping[str, Any]) -> None:
        sign_export(self._folder, self._key)

    def client_done(self, receipt: Receipt) -> None:
        figures = {key.removeprefix(FIGURE): value for key, value in receipt.metrics.items() if key.startswith(FIGURE)}
        if figures and receipt.client in self._sites:
            # They are of the student that the round began with.
            line = {"round": receipt.round - 1, "site": self._sites[receipt.client], **figures}
            with (self._folder / SITE_FIGURES).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
