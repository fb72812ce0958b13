"""What does a trial cost? The same registry served three times, side by side, in one run:

1. its current version alone;
2. beside a candidate in shadow, on all of the traffic;
3. beside a candidate as a canary, for half of it.

    python benchmarks/serve_trial.py RUN [--seconds 5] [--connections 16] [--rounds 7]

They take turns, each turn in another order; medians over the rounds are shown, with the ratio to the first.
"""

import argparse
import json
import random
import statistics
import tempfile
from contextlib import ExitStack
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


def measure(run: Path, seconds: float, connections: int, rounds: int) -> None:
    size = json.loads(read_file(run, student_file(CARD)))["input"]
    image = np.random.default_rng(0).integers(0, 256, (1, size["height"], size["width"]))
    request = http_request(json.dumps({"instances": image.tolist()}).encode(), "application/json")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    measure(arguments.run, arguments.seconds, arguments.connections, arguments.rounds)


if __name__ == "__main__":
    main()
