"""What does a trial cost? The same registry served three times, side by side, in one run:

1. its current version alone;
2. beside a candidate in shadow, on all of the traffic;
3. beside a candidate as a canary, for half of it.

    python benchmarks/serve_trial.py RUN [--seconds 5] [--connections 16] [--rounds 7]
    python benchmarks/serve_trial.py RUN --cpu

They take turns, each turn in another order; medians over the rounds are shown, with the ratio to the first. `--cpu`
takes the application alone, without Ray and network, and counts processor time, which means something on a busy
machine too.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import numpy as np
from serve_load import Load, http_request, load, running

from fedppd_ray.releases.live import LiveGates
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import Candidate, Mode, State, now
from fedppd_ray.runs.layout import CARD, student_file
from fedppd_ray.runs.remote import read_file

_NAMES = {"wait": "no trial", "shadow": "a shadow of all", "canary": "a canary of half"}
_SHARES = {"wait": 0.0, "shadow": 1.0, "canary": 0.5}
_REQUESTS = 640  # of a turn of --cpu
_ENDLESS = LiveGates(requests=10**9)


def make_registry(folder: Path, run: Path, mode: Mode) -> Path:
    """The run's student as current, and, since a trial costs the same whatever the weights are, as candidate too."""
    registry = Registry.open_or_create(folder / mode)
    version = registry.stage(run)
    registry.seal(version, {}, run, "benchmark")
    trial = Candidate(version=version, mode=mode, share=_SHARES[mode], live=_ENDLESS, since=now())
    state = State(current=version, candidate=None if mode == "wait" else trial)
    registry.move(lambda _: state, who="benchmark", what="promoted", version=version, why="a benchmark")
    return folder / mode


def one_image(run: Path) -> bytes:
    size = json.loads(read_file(run, student_file(CARD)))["input"]
    image = np.random.default_rng(0).integers(0, 256, (1, size["height"], size["width"]))
    return json.dumps({"instances": image.tolist()}).encode()


def measure(run: Path, seconds: float, connections: int, rounds: int) -> None:
    request = http_request(one_image(run), "application/json")
    found: dict[tuple[str, int], list[Load]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as services:
        registries = {mode: make_registry(Path(temporary), run, mode) for mode in _NAMES}
        ports = {mode: services.enter_context(running("service", place)) for mode, place in registries.items()}
        for _ in range(rounds):
            for count in (connections, 1):
                for mode in random.sample(list(ports), len(ports)):
                    found.setdefault((mode, count), []).append(load(ports[mode], request, count, seconds))
    show(found, (connections, 1))


def show(found: dict[tuple[str, int], list[Load]], counts: tuple[int, int]) -> None:
    columns = f"{'connections':>12}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'failed':>8}"
    print(f"{'one image per request':24}{columns}  ratio")
    for count in counts:
        alone = [one.requests_a_second for one in found["wait", count]]
        for mode, name in _NAMES.items():
            loads = found[mode, count]
            speeds = [one.requests_a_second for one in loads]
            middle = [statistics.median(values) for values in zip(*((o.p50, o.p99) for o in loads), strict=True)]
            each = sorted(mine / other for mine, other in zip(speeds, alone, strict=True))
            print(
                f"{name:24}{count:>12}{statistics.median(speeds):>12,.0f}{middle[0]:>9.2f}{middle[1]:>9.2f}"
                f"{sum(one.failures for one in loads):>8}  {statistics.median(each):.3f} ({each[0]:.2f}–{each[-1]:.2f})"
            )


async def measure_cpu(run: Path, connections: int, rounds: int) -> None:
    import httpx
    import torch

    from serve.app import create_app
    from serve.metrics import Metrics
    from serve.predictor import Predictor
    from serve.settings import Settings

    torch.set_num_threads(1)
    body, headers = one_image(run), {"Content-Type": "application/json"}
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in _NAMES}
    with tempfile.TemporaryDirectory() as temporary:
        async with AsyncExitStack() as stack:
            clients = {}
            for mode in _NAMES:
                settings = Settings(run=str(make_registry(Path(temporary), run, mode)), threads=1)
                app = create_app(Predictor(settings, Metrics()), settings)
                await stack.enter_async_context(app.router.lifespan_context(app))
                transport = httpx.ASGITransport(app=app)
                clients[mode] = await stack.enter_async_context(
                    httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers)
                )
            await asyncio.sleep(3)  # until the candidates are loaded

            async def ask(client: httpx.AsyncClient) -> None:
                for _ in range(_REQUESTS // connections):
                    (await client.post("/predict", content=body)).raise_for_status()

            for _ in range(rounds):
                for mode in random.sample(list(clients), len(clients)):
                    whole, loop = time.process_time(), time.thread_time()
                    await asyncio.gather(*(ask(clients[mode]) for _ in range(connections)))
                    found[mode].append((time.process_time() - whole, time.thread_time() - loop))
    print(f"{'one image per request':24}{'ms of all threads':>18}{'of the event loop':>18}   ratios")
    for mode, name in _NAMES.items():
        shown = [1000 * statistics.median(values) / _REQUESTS for values in zip(*found[mode], strict=True)]
        ratios = [
            statistics.median(
                mine[which] / alone[which] for mine, alone in zip(found[mode], found["wait"], strict=True)
            )
            for which in (0, 1)
        ]
        print(f"{name:24}{shown[0]:>18.3f}{shown[1]:>18.3f}   {ratios[0]:.3f}  {ratios[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="processor time of the application alone")
    arguments = parser.parse_args()
    if arguments.cpu:
        asyncio.run(measure_cpu(arguments.run, arguments.connections, arguments.rounds))
        return
    measure(arguments.run, arguments.seconds, arguments.connections, arguments.rounds)


if __name__ == "__main__":
    main()
