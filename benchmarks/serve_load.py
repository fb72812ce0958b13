"""How fast is the service? Side by side, in one run, on the same student:

1. `fedppd serve`;
2. a plain hand-written FastAPI + uvicorn application around the same network;
3. the same service predicting by an ensemble of 30 weight samples, which is what the student spares;
4. one large npy batch through the service against a bare torch forward pass.

    python benchmarks/serve_load.py RUN [--seconds 5] [--connections 16] [--rounds 3]

The load comes from one process with keep-alive connections, each sending the next request when it has its answer.
They take turns, so that a busy machine hurts all alike; medians are shown.
"""

import argparse
import asyncio
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SAMPLES = 30
LARGE = 4096
_PREPARE_SECONDS = 1.0


@dataclass(frozen=True)
class Load:
    requests_a_second: float
    p50: float
    p99: float
    failures: int


class _Caller(asyncio.Protocol):
    """One keep-alive connection: sends the same request again as soon as the answer is complete."""

    def __init__(self, request: bytes, until: float, latencies: list[float], failures: list[str]) -> None:
        self._request, self._until = request, until
        self._latencies, self._failures = latencies, failures
        self._buffer = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        start = head.lower().index(b"content-length:") + 15
        length = int(head[start:].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        now = time.perf_counter()
        self._latencies.append(now - self._sent)
        if not head.startswith(b"HTTP/1.1 200"):
            self._failures.append(head.split(b"\r\n", 1)[0].decode())
        self._buffer = b""
        if now < self._until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._buffer or time.perf_counter() < self._until:
            self._failures.append("connection lost")
        if not self.done.done():
            self.done.set_result(None)


async def _load(port: int, request: bytes, connections: int, seconds: float) -> Load:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    failures: list[str] = []
    started = time.perf_counter()
    until = started + seconds
    callers = []
    for _ in range(connections):
        made = await loop.create_connection(lambda: _Caller(request, until, latencies, failures), "127.0.0.1", port)
        callers.append(made[1])
    await asyncio.gather(*(caller.done for caller in callers))
    took = time.perf_counter() - started
    ordered = sorted(latencies)
    quantile = [1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return Load(len(ordered) / took, *quantile, len(failures))


def load(port: int, request: bytes, connections: int, seconds: float) -> Load:
    asyncio.run(_load(port, request, connections, _PREPARE_SECONDS))
    return asyncio.run(_load(port, request, connections, seconds))


def http_request(body: bytes, media_type: str) -> bytes:
    lines = ["POST /predict HTTP/1.1", "Host: localhost", f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


# --- the servers -----------------------------------------------------------------------------------------------


def plain_server(run: Path, port: int) -> None:
    """What one writes by hand in ten minutes: no batching, no limits, no metrics, one process."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from fedppd_ray.data.rows import normalisation
    from fedppd_ray.runs.export import read_student

    torch.set_num_threads(1)
    card, model = read_student(run)
    scale, shift = normalisation(card["normalisation"]["mean"], card["normalisation"]["std"])

    class Request(BaseModel):
        instances: list[list[list[float]]]

    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        pixels = torch.tensor(request.instances).unsqueeze(1)
        with torch.inference_mode():
            probabilities = torch.softmax(model.module(torch.addcmul(shift, pixels, scale)).double(), 1)
            entropy = torch.special.entr(probabilities).sum(1)
        labels = probabilities.argmax(1).tolist()
        rows = zip(labels, probabilities.tolist(), entropy.tolist(), strict=True)
        return {"predictions": [{"label": row[0], "probabilities": row[1], "entropy": row[2]} for row in rows]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def service(run: Path, port: int, ensemble: bool) -> None:
    from serve.launch import Plan, serve_until

    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    plan = Plan(run, "127.0.0.1", port, 1, False, False, None)
    serve_until(plan, stop, replica=_ensemble_deployment if ensemble else None)


def _ensemble_deployment() -> Any:
    """The service's own replica, with a student that averages 30 networks near the exported one."""
    import torch
    from ray import serve as ray_serve

    from fedppd_ray.inference.student import Student
    from fedppd_ray.runs.export import read_student
    from serve.deployment import StudentReplica, deployment
    from serve.student import ServedStudent

    class Ensemble(Student):
        def __init__(self, run: Path) -> None:
            generator = torch.Generator().manual_seed(0)
            members = []
            for _ in range(SAMPLES):
                card, model = read_student(run)
                noise = torch.randn(model.vector.shape, generator=generator)
                model.vector.add_(0.01 * noise)
                members.append(Student(card, model))
            super().__init__(card, model)
            self._members = members

        def evidence(self, rows: Any) -> Any:
            probabilities = [np.exp(member.log_probabilities(rows)) for member in self._members]
            return np.log(np.mean(probabilities, axis=0))

    class EnsembleReplica(StudentReplica):
        load = staticmethod(lambda run, most: ServedStudent(Ensemble(run), most))

    return deployment(ray_serve.ingress()(EnsembleReplica))


@contextmanager
def running(kind: str, run: Path) -> Iterator[int]:
    """A server in a process of its own; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RAY_AUTH_MODE": "token"} | os.environ
    command = [sys.executable, __file__, str(run), "--server", kind, "--port", str(port)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        path = "docs" if kind == "plain" else "readyz"
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the {kind} server did not start")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


# --- what is measured ------------------------------------------------------------------------------------------


def large_batches(port: int, run: Path, pixels: Any, repeat: int) -> tuple[float, float]:
    """Images per second through the service and by the network alone, in turns; the best of each.

    The best, because whatever else runs on the machine only ever slows: a median compares the neighbours' moods.
    """
    import torch

    from fedppd_ray.runs.export import read_student

    file = io.BytesIO()
    np.save(file, pixels)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict", data=file.getvalue(), headers={"Content-Type": "application/x-npy"}
    )
    torch.set_num_threads(os.cpu_count() or 1)
    _, model = read_student(run)
    inputs = torch.from_numpy(pixels).float()[:, None] / 255
    through, bare = [], []
    for _ in range(repeat):
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
        through.append(LARGE / (time.perf_counter() - started))
        started = time.perf_counter()
        with torch.inference_mode():
            for part in inputs.split(500):
                model.module(part)
        bare.append(LARGE / (time.perf_counter() - started))
    if len(json.loads(content)["predictions"]) != LARGE:
        raise SystemExit("the service answered fewer images than were sent")
    return max(through), max(bare)


def measure(run: Path, seconds: float, connections: int, rounds: int) -> None:
    card = json.loads((run / "student" / "model.json").read_text())
    if card["input"]["channels"] != 1:
        raise SystemExit("this benchmark sends grey images; give a run on a grey data set")
    sides = (card["input"]["height"], card["input"]["width"])
    generator = np.random.default_rng(0)
    one = json.dumps({"instances": generator.integers(0, 256, (1, *sides)).tolist()}).encode()
    request = http_request(one, "application/json")
    pixels = generator.integers(0, 256, (LARGE, *sides), np.uint8)
    loads: dict[str, list[Load]] = {"service": [], "plain": [], "ensemble": []}
    single: dict[str, list[Load]] = {"service": [], "plain": []}
    through: list[float] = []
    bare: list[float] = []
    with running("service", run) as ours, running("plain", run) as plain, running("ensemble", run) as ensemble:
        for _ in range(rounds):
            loads["service"].append(load(ours, request, connections, seconds))
            loads["plain"].append(load(plain, request, connections, seconds))
            loads["ensemble"].append(load(ensemble, request, connections, seconds))
            single["service"].append(load(ours, request, 1, seconds / 2))
            single["plain"].append(load(plain, request, 1, seconds / 2))
            best = large_batches(ours, run, pixels, 8)
            through.append(best[0])
            bare.append(best[1])
    _print_table(loads, single, connections)
    large, forward = max(through), max(bare)
    print(f"\none npy batch of {LARGE} images: service {large:,.0f} images/s, bare forward pass {forward:,.0f}")
    print(f"  ratio {large / forward:.2f}  (each round: {_ratios(through, bare)})")


def _print_table(loads: dict[str, list[Load]], single: dict[str, list[Load]], connections: int) -> None:
    names = {
        "service": "this service (fedppd serve)",
        "plain": "plain FastAPI + uvicorn",
        "ensemble": f"this service, {SAMPLES}-sample ensemble",
    }
    print(f"{'one image per request':32}{'connections':>12}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'failed':>8}")
    for count, table in ((connections, loads), (1, single)):
        for kind, rows in table.items():
            middle = [
                statistics.median(getattr(row, name) for row in rows) for name in ("requests_a_second", "p50", "p99")
            ]
            failed = sum(row.failures for row in rows)
            print(f"{names[kind]:32}{count:>12}{middle[0]:>12,.0f}{middle[1]:>9.2f}{middle[2]:>9.2f}{failed:>8}")
    speed = {kind: [row.requests_a_second for row in rows] for kind, rows in loads.items()}
    ratio = statistics.median(speed["service"]) / statistics.median(speed["plain"])
    each = _ratios(speed["service"], speed["plain"])
    print(f"\nservice / plain at {connections} connections: {ratio:.2f}  (each round: {each})")
    print(f"service / ensemble: {statistics.median(speed['service']) / statistics.median(speed['ensemble']):.1f}")


def _ratios(above: list[float], below: list[float]) -> str:
    return ", ".join(f"{a / b:.2f}" for a, b in zip(above, below, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=["service", "ensemble", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.server == "plain":
        plain_server(arguments.run, arguments.port)
    elif arguments.server:
        service(arguments.run, arguments.port, arguments.server == "ensemble")
    else:
        measure(arguments.run, arguments.seconds, arguments.connections, arguments.rounds)


if __name__ == "__main__":
    main()
