"""`fedppd serve`: a Ray of our own (or the cluster at $RAY_ADDRESS), the application on it, until a signal."""

import logging
import os
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.checkpoint.export import read_card
from fedppd_ray.checkpoint.remote import Location, absolute
from fedppd_ray.errors import ConfigError, FedPPDError, ResourceError
from serve.proxy import set_proxy_environment
from serve.settings import Settings, check_exposure, read_token_digest

logger = logging.getLogger("fedppd.serve")

_NAME = "fedppd"
_START_SECONDS = 120.0
_LOOK_SECONDS = 5.0
# Behind the replica's own limits (body 10 s + prediction 20 s): ends whatever those do not see.
_REQUEST_SECONDS = 40.0


@dataclass(frozen=True)
class Plan:
    run: Location
    host: str
    port: int
    replicas: int
    watch: bool
    insecure: bool
    token_file: Path | None


def serve_until(
    plan: Plan,
    stop: threading.Event,
    announce: Callable[[str], None] = print,
    replica: Callable[[], Any] | None = None,
) -> None:
    """Serve until `stop` is set; returns when requests in flight have been answered.

    `replica` makes another Serve deployment than the usual one (benchmarks do).
    """
    digest = read_token_digest(os.environ, plan.token_file)
    check_exposure(plan.host, digest, plan.insecure)
    card = read_card(plan.run)
    cores = os.cpu_count() or 1
    settings = Settings(
        run=absolute(plan.run),
        watch=plan.watch,
        threads=max(1, cores // plan.replicas),
        token_sha256=digest,
    )
    with _ray(plan, cores):
        _deploy(plan, settings, replica)
        try:
            _wait_until_ready(plan)
            protected = "with a token" if digest else "without a token"
            announce(f"serving {card['name']} {card['version']} at {_url(plan)}  ({protected}; Ctrl-C stops)")
            _watch_over(stop)
        finally:
            announce("stopping: requests in flight are being answered")
            _withdraw()


@contextmanager
def _ray(plan: Plan, cores: int) -> Iterator[None]:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        _check_port(plan.host, plan.port)
    with tempfile.TemporaryDirectory(prefix="fedppd-serve-") as folder:
        haproxy = False if address else set_proxy_environment(os.environ, Path(folder), drain_seconds=1)
        # Only now: Ray reads the environment as it is imported and started.
        import ray
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        http = {"host": plan.host, "port": plan.port, "request_timeout_s": _REQUEST_SECONDS}
        try:
            if address:
                ray.init(address=address, **quiet)
            else:
                # A node address of this machine alone: no port of this Ray is meant for others.
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=max(cores, plan.replicas),
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
            ray_serve.start(http_options=http, proxy_location="HeadOnly" if not address else "EveryNode")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ResourceError(f"no Ray cluster at {address or 'this machine'}: {reason}") from None
        logger.info("proxy: %s", _proxy_name(haproxy, address))
        try:
            yield
        finally:
            if not address:
                ray_serve.shutdown()
            ray.shutdown()


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
    while True:
        try:
            with urllib.request.urlopen(f"{_url(plan)}/readyz", timeout=5):
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


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror})") from None


def _url(plan: Plan) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(plan.host, plan.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{plan.port}"
