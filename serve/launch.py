"""`fedppd serve`: a Ray of our own (or the cluster at $RAY_ADDRESS), the application on it, until a signal."""

import fcntl
import logging
import os
import shutil
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.errors import ConfigError, FedPPDError, ResourceError
from fedppd_ray.runs.remote import Location, absolute
from fedppd_ray.runs.signature import trusted_key
from serve.haproxy_config import CLIENT_HEADER
from serve.proxy import ray_folder, set_proxy_environment, short_folder
from serve.settings import Settings, check_exposure, check_ray_authentication
from serve.source import source_of
from serve.tls import certificate_file
from serve.tokens import read_tokens, token_file
from serve.tracing import trace_endpoint

logger = logging.getLogger("fedppd.serve")

_NAME = "fedppd"
_START_SECONDS = 120.0
_LOOK_SECONDS = 5.0
# Behind the replica's own limits (body 10 s + prediction 20 s): ends whatever those do not see.
_REQUEST_SECONDS = 40.0
_KEEP_ALIVE_SECONDS = 30
_FOLDER = "fedppd-"


@dataclass(frozen=True)
class Plan:
    run: Location
    host: str
    port: int
    replicas: int
    watch: bool
    insecure: bool
    token_file: Path | None
    client_connections: int = 256
    client_requests: float = 0.0
    access_log: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    grpc_port: int | None = None
    otlp_endpoint: str | None = None
    drift_webhook: str | None = None


def serve_until(
    plan: Plan,
    stop: threading.Event,
    announce: Callable[[str], None] = print,
    replica: Callable[[], Any] | None = None,
) -> None:
    """Serve until `stop` is set; returns when requests in flight have been answered.

    `replica` makes another Serve deployment than the usual one (benchmarks do).
    """
    tokens = read_tokens(os.environ, plan.token_file)
    check_exposure(plan.host, bool(tokens), plan.insecure)
    if not os.environ.get("RAY_ADDRESS"):
        check_ray_authentication(os.environ, plan.insecure)
    card = source_of(plan.run).card()
    cores = os.cpu_count() or 1
    settings = Settings(
        run=absolute(plan.run),
        watch=plan.watch,
        threads=max(1, cores // plan.replicas),
        trusted_key=trusted_key(),
        tokens=tokens,
        token_file=_absolute(plan.token_file or token_file(os.environ)),
        client_requests_a_second=plan.client_requests,
        access_log=_absolute(plan.access_log),
        drift_webhook=plan.drift_webhook,
        otlp_endpoint=trace_endpoint(plan.otlp_endpoint) if plan.otlp_endpoint else None,
        grpc_host=plan.host,
        grpc_port=plan.grpc_port,
        grpc_certificate=_absolute(plan.certificate),
        grpc_key=_absolute(plan.key),
    )
    with _ray(plan, cores) as local:
        settings = settings.model_copy(update=local)
        _deploy(plan, settings, replica)
        try:
            _wait_until_ready(plan)
            protected = "with a token" if tokens else "without a token"
            announce(f"serving {card['name']} {card['version']} at {_url(plan)}  ({protected}; Ctrl-C stops)")
            _watch_over(stop)
        finally:
            announce("stopping: requests in flight are being answered")
            _withdraw()


@contextmanager
def _ray(plan: Plan, cores: int) -> Iterator[dict[str, Any]]:
    """Ray and Serve; yields the settings that a Ray of our own, and its HAProxy, have to offer."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        _check_port(plan.host, plan.port)
        if plan.grpc_port is not None:
            _check_port(plan.host, plan.grpc_port, "--grpc-port")
    with _own_folder() as folder:
        temporary = None if address else ray_folder(os.environ)
        certificate = certificate_file(plan.certificate, plan.key, folder)
        haproxy = not address and set_proxy_environment(os.environ, folder, 1, plan.client_connections, certificate)
        if certificate and not haproxy:
            raise ConfigError(
                "--tls-cert: HTTPS needs the HAProxy of a Ray of its own; put a TLS proxy in front instead"
            )
        # Only now: Ray reads the environment as it is imported and started.
        import ray
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        http = {
            "host": plan.host,
            "port": plan.port,
            "request_timeout_s": _REQUEST_SECONDS,
            "keep_alive_timeout_s": _KEEP_ALIVE_SECONDS,
        }
        try:
            with _same_answer_to_sigterm():
                if address:
                    ray.init(address=address, **quiet)
                else:
                    # A node address of this machine alone: no port of this Ray is meant for others.
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        num_cpus=max(cores, plan.replicas),
                        _node_ip_address="127.0.0.1",
                        _temp_dir=temporary,
                        **quiet,
                    )
            ray_serve.start(http_options=http, proxy_location="HeadOnly" if not address else "EveryNode")
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ResourceError(f"no Ray cluster at {address or 'this machine'}: {reason}") from None
        logger.info("proxy: %s", _proxy_name(haproxy, address))
        try:
            yield ({"client_header": CLIENT_HEADER} if haproxy else {}) | _shared_metrics(folder, address)
        finally:
            if not address:
                ray_serve.shutdown()
            ray.shutdown()


def _shared_metrics(folder: Path, address: str | None) -> dict[str, str]:
    """A folder that all replicas of this machine can reach; those of a cluster have none of ours in common."""
    if address:
        return {}
    (folder / "metrics").mkdir()
    return {"metrics_folder": str(folder / "metrics")}


@contextmanager
def _same_answer_to_sigterm() -> Iterator[None]:
    """ray.init puts a handler of its own there, which ends the process at once; service managers ask by SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for the proxy's files. Those of services that were killed are removed: nobody else would do it."""
    folder = short_folder(_FOLDER)
    with (folder / "lock").open("w") as lock:
        # Held while this process lives, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in folder.parent.glob(f"{_FOLDER}*"):
            if other != folder and _is_abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # it is held, is somebody else's, or has no lock yet
        return False


def _proxy_name(haproxy: bool, address: str | None) -> str:
    if address:
        return f"as the cluster at {address} was started"
    return "HAProxy" if haproxy else "Ray's own, which is slow: no HAProxy here (it ships with ray[serve] on Linux)"


def _deploy(plan: Plan, settings: Settings, replica: Callable[[], Any] | None) -> None:
    from ray import serve as ray_serve

    from serve.deployment import Student

    deployment = replica() if replica else Student
    target = deployment.options(num_replicas=plan.replicas).bind(settings.model_dump())
    try:
        ray_serve.run(target, name=_NAME, route_prefix="/", logging_config={"enable_access_log": False})
    except RuntimeError as error:
        raise ResourceError(f"the service did not start: {' '.join(str(error).split())[:500]}") from None


def _wait_until_ready(plan: Plan) -> None:
    """The replicas are up before the proxy has heard of them."""
    deadline = time.monotonic() + _START_SECONDS
    # It is our own server, and its certificate is most likely for another name than the address asked here.
    anyone = ssl._create_unverified_context() if plan.certificate else None
    while True:
        try:
            with urllib.request.urlopen(f"{_url(plan)}/readyz", timeout=5, context=anyone):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise ResourceError(f"{_url(plan)} does not answer after {_START_SECONDS:g} s: {error}") from None
            time.sleep(0.2)


def _watch_over(stop: threading.Event) -> None:
    """Wait; say so, and end, should the application fail for good."""
    from ray import serve as ray_serve

    while not stop.wait(_LOOK_SECONDS):
        application = ray_serve.status().applications.get(_NAME)
        if application is None or application.status in ("DEPLOY_FAILED", "NOT_STARTED"):
            raise FedPPDError(f"the service is gone: {application.message if application else 'it was deleted'}")


def _withdraw() -> None:
    """Deleting the application, before Serve itself stops, lets its replicas finish what they have begun."""
    from ray import serve as ray_serve

    ray_serve.delete(_NAME)


def _absolute(path: Path | None) -> str | None:
    """Replicas have other working folders."""
    return str(path.resolve()) if path else None


def _check_port(host: str, port: int, option: str = "--port") -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--host {host} {option} {port}: cannot listen there ({error.strerror})") from None


def _url(plan: Plan) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(plan.host, plan.host)
    scheme = "https" if plan.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{plan.port}"
