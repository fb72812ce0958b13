"""The Ray Serve application: `serve.deployment:application`, for `fedppd serve`, `serve run` and a RayService."""

import asyncio
import gc
import logging
import os
import sys
import threading
from typing import Any

import ray
import torch
from fastapi import FastAPI
from pydantic import Field
from ray import serve as ray_serve
from ray.serve.config import BackpressureConfig
from ray.serve.metrics import Gauge

from fedppd_ray.config.own_networks import allow
from fedppd_ray.errors import ConfigError
from fedppd_ray.runs.remote import absolute
from fedppd_ray.runs.signature import trust, trusted_key
from serve.access_log import WithRequest
from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Loader, Predictor
from serve.settings import Settings
from serve.student import ServedStudent
from serve.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, read_tokens, token_file

logger = logging.getLogger("fedppd.serve")

_MIRROR_SECONDS = 5.0


class ApplicationArgs(Settings):
    """`args` of the application in a Serve config file."""

    insecure: bool = Field(False, description="Serve without a token.")


class StudentReplica:
    """One process that holds the student. Its HTTP interface is built here, where the model is."""

    load: Loader = staticmethod(ServedStudent.load)

    def __init__(self, settings: dict[str, Any]) -> None:
        _log_to_stderr()
        self._settings = _with_threads(Settings.model_validate(settings))
        allow(self._settings.allow_networks)
        trust(self._settings.trusted_key)
        self._predictor = Predictor(self._settings, Metrics(), self.load)
        _RayMirror(self._predictor.metrics).start()
        # What is loaded now stays: the collector need not look at a million objects again while requests wait.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._predictor, self._settings)

    async def reconfigure(self, _user_config: object) -> None:
        """A changed `user_config` makes the replica look for a new export, as `watch` does by itself.

        It loads in the background: Ray takes a replica out of the routing while this method runs.
        """
        threading.Thread(target=self._predictor.refresh, name="reload", daemon=True).start()

    async def check_health(self) -> None:
        await asyncio.to_thread(self._predictor.current.check)


def _with_threads(settings: Settings) -> Settings:
    if settings.threads is not None:
        return settings
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    return settings.model_copy(update={"threads": max(1, int(assigned))})


# One row of settings for every way to start it; a config file may change each.
# Above `max_pending` the replica itself answers 503 with a reason; Serve's own limits are the backstop behind it.
deployment = ray_serve.deployment(
    name="student",
    num_replicas=1,
    max_ongoing_requests=512,
    max_queued_requests=256,
    backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
    health_check_period_s=10,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.5,
    graceful_shutdown_timeout_s=30,
    ray_actor_options={"num_cpus": 1},
)
Student = deployment(ray_serve.ingress()(StudentReplica))


def application(args: ApplicationArgs) -> Any:
    """Builds the application from the `args` of a config file; the token comes from the environment or its file."""
    tokens = args.tokens or read_tokens(os.environ)
    if not tokens and not args.insecure:
        raise ConfigError(
            f"no token: set ${TOKEN_VARIABLE} or ${TOKEN_FILE_VARIABLE} on the head node, or `insecure: true` in args"
        )
    file = args.token_file or (str(path) if (path := token_file(os.environ)) else None)
    found = {"tokens": tokens, "token_file": file, "trusted_key": args.trusted_key or trusted_key()}
    settings = args.model_copy(update=found).model_dump(exclude={"insecure"})
    return Student.bind(settings | {"run": absolute(args.run)})


class _RayMirror(threading.Thread):
    """Copies a replica's metrics to Ray's node exporter, where Prometheus finds those of all replicas.

    Every sample becomes a gauge of the same name: PromQL's rate() and histogram_quantile() treat them alike, and
    the request path records each number once.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(name="mirror-metrics", daemon=True)
        self._metrics = metrics
        self._gauges: dict[str, Any] = {}

    def run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_MIRROR_SECONDS):
            for family in self._metrics.collect():
                for sample in family.samples:
                    gauge = self._gauges.get(sample.name)
                    if gauge is None:
                        gauge = Gauge(sample.name, family.documentation, tag_keys=tuple(sample.labels))
                        self._gauges[sample.name] = gauge
                    gauge.set(sample.value, tags=sample.labels)


def _log_to_stderr() -> None:
    """A replica's own log lines go where Ray collects them, and from there to whoever started the service."""
    # Serve replaces sys.stderr by a log file of its own that nobody follows; the original is forwarded.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s [%(request)s] %(message)s", "%H:%M:%S"))
    handler.addFilter(WithRequest())
    package = logging.getLogger("fedppd")
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False
    # Small forward passes run on the event loop's thread; helpers would spin on a core that requests need.
    torch.set_num_threads(1)
