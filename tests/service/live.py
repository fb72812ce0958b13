"""A real server in a process of its own, and a client that keeps connections busy."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
TOKEN = "test-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int
    run: Path
    log: Path
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, run: Path, log: Path, **environment: str) -> Iterator[Server]:
    """Starts it, waits until it is ready, and leaves nothing behind."""
    # A token for Ray itself, because else Ray writes one into the home folder.
    # A Ray of another test must not be found: this one starts its own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = inherited | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "r" * 40} | environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, port, run, log, "https" if "--tls-cert" in command else "http")
    family = psutil.Process(process.pid)
    members: list[psutil.Process] = []
    try:
        _wait_ready(server)
        members = family.children(recursive=True)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        finally:
            _, alive = psutil.wait_procs(members, timeout=20)
            for member in alive:
                member.kill()
    assert not alive, f"left behind: {[member.name() for member in alive]}"


def fedppd_serve(
    run: Path, log: Path, *options: str, port: int | None = None, **environment: str
) -> "contextmanager[Server]":  # type: ignore[type-arg]
    port = port or free_port()
    command = [sys.executable, "-m", "fedppd_ray", "serve", str(run), "--port", str(port), *options]
    return running(command, port, run, log, **({"FEDPPD_TOKEN": TOKEN} | environment))  # type: ignore[return-value]


def _wait_ready(server: Server) -> None:
    def ready() -> bool:
        assert server.process.poll() is None, server.text()
        try:
            return httpx.get(f"{server.url}/readyz", timeout=5, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(ready, 120, server.text)


def wait_for(condition: Callable[[], bool], seconds: float, what: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


async def keep_busy(url: str, connections: int, stop: asyncio.Event, body: bytes) -> tuple[Counter[str], list[float]]:
    """Posts `body` on every connection, one request after the other, until `stop`; counts versions and failures."""
    seen: Counter[str] = Counter()
    latencies: list[float] = []

    async def one(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            started = time.perf_counter()
            try:
                answer = await client.post(f"{url}/predict", content=body)
                failed = f"failed: {answer.status_code} {answer.text[:200]}"
                seen[answer.json()["model"]["version"] if answer.status_code == 200 else failed] += 1
            except httpx.HTTPError as error:
                seen[f"failed: {error!r}"] += 1
            latencies.append(time.perf_counter() - started)

    headers = {"Content-Type": "application/json", **HEADERS}
    limits = httpx.Limits(max_connections=connections)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=30) as client:
        await asyncio.gather(*(one(client) for _ in range(connections)))
    return seen, latencies
