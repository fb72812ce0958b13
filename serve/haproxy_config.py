"""Stands in for the HAProxy binary: hardens the configuration that Ray wrote, and becomes the real one.

Ray renders HAProxy's configuration from a template of its own, anew whenever replicas come or go, and has no setting
for time-outs of headers, limits for each source, TLS or the statistics' address. It does have one for the binary. This
file is run as a script, by the standard library alone: `python haproxy_config.py SETTINGS BINARY ARGUMENTS…`.
"""

import ctypes
import json
import os
import re
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CLIENT_HEADER = "x-fedppd-client"
_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Hardening:
    """What the service's HAProxy does beyond what Ray configures."""

    stats_port: int
    metrics_port: int
    header_seconds: int = 10
    client_connections: int = 256  # of one source address at a time; 0: as many as it likes
    certificate: str | None = None  # a file with certificate chain and key: HTTPS instead of HTTP


class UnknownConfiguration(Exception):
    """Ray's template has changed so that a rule cannot be added. Better no proxy than one without its limits."""


def harden(text: str, rules: Hardening) -> str:
    """The same configuration, with limits. Done twice, it changes nothing the second time."""
    if "# hardened" in text:
        return text
    text = re.sub(
        rf"^( *bind) [*]?:({rules.stats_port}|{rules.metrics_port})$", r"\1 127.0.0.1:\2", text, flags=re.MULTILINE
    )
    # Headers must be complete by then; for bodies, the replicas have a limit of their own.
    text = _after(text, r"^defaults\n", f"    # hardened\n    timeout http-request {rules.header_seconds}s\n")
    security = f" ssl crt {rules.certificate} ssl-min-ver TLSv1.2 alpn http/1.1" if rules.certificate else ""
    text = _after(text, r"^frontend http_frontend\n    bind \S+", f"{security}\n{_source_rules(rules)}".rstrip("\n"))
    return _with_health(text)


def _source_rules(rules: Hardening) -> str:
    lines = [f"http-request set-header {CLIENT_HEADER} %[src]"]
    if rules.client_connections:
        # Refused as they are accepted: they take no place from others.
        lines = [
            "stick-table type ipv6 size 100k expire 5m store conn_cur",
            "tcp-request connection track-sc0 src",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {rules.client_connections} }}",
            *lines,
        ]
    return "".join(f"    {line}\n" for line in lines)


def _with_health(text: str) -> str:
    """/healthz is answered here, while a replica passes HAProxy's own checks: busy replicas cannot delay it."""

    def answered(match: re.Match[str]) -> str:
        content = 'content-type application/json string \'{"status":"ok"}\''
        return f"{match[0]}    http-request return status 200 {content} if {{ path /healthz }} METH_GET {match[1]}\n"

    return re.sub(r"^    acl (backend_\S+_server_up) nbsrv\(\S+\) ge 1\n", answered, text, flags=re.MULTILINE)


def _after(text: str, pattern: str, addition: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise UnknownConfiguration(f"Ray's HAProxy configuration has no {pattern!r}: this release of Ray is too new")
    return text[: match.end()] + addition + text[match.end() :]


def script(python: str, binary: str, rules: Hardening) -> str:
    """A shell script to be called instead of the binary."""
    settings = json.dumps(asdict(rules)).replace("'", "'\\''")
    return f"#!/bin/sh\nexec '{python}' -I -S '{Path(__file__).resolve()}' '{settings}' '{binary}' \"$@\"\n"


def main(arguments: list[str]) -> None:
    settings, binary, *rest = arguments
    if "-f" in rest:
        path = Path(rest[rest.index("-f") + 1])
        path.write_text(harden(path.read_text(encoding="utf-8"), Hardening(**json.loads(settings))), encoding="utf-8")
    if sys.platform == "linux":
        # When Ray's manager is killed, HAProxy must not hold the port and answer for nobody. Survives the next line.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.execv(binary, ["haproxy", *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
