"""Fifty short rounds while a client's process is killed every few seconds.

    python benchmarks/soak.py [--rounds 50] [--every 4]

Prints the resident memory of the driver and of the server after a tenth of the rounds and at the end, and fails if a
round is missing or memory grew by more than a tenth.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from fedppd_ray.cli.display import PlainDisplay
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import client_ids
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.types import Failure
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.runtime.ray_executor import RayExecutor

CONFIG = {
    "name": "soak",
    "data": {"name": "mnist5k", "calibration": 100, "partition": {"kind": "iid", "rows_per_client": 150}},
    "client": {"epochs": 2},
}


def resident_megabytes(pid: int) -> float:
    """Its own memory: pages of the object store, which all processes share, come and go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def random_client(executor: RayExecutor) -> int | None:
    """The process of one of this run's own clients; None while that one is being replaced."""
    host = random.choice(executor.hosts._hosts)
    try:
        return int(ray.get(host.handle.process.remote(), timeout=5))
    except (RayError, TimeoutError):
        return None


class Watch(PlainDisplay):
    """Counts failures and notes memory as rounds go by."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self._server_pid = ray.get(server.__ray_call__.remote(lambda _self: os.getpid()))
        self.retried = self.dropped = 0
        self.memory: dict[int, tuple[float, float]] = {}

    def client_failed(self, failure: Failure, action: Action) -> None:
        super().client_failed(failure, action)
        self.retried += action is Action.RETRY
        self.dropped += action is Action.DROP

    def round_finished(self, record: dict[str, Any]) -> None:
        super().round_finished(record)
        self.memory[record["round"]] = (resident_megabytes(os.getpid()), resident_megabytes(self._server_pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two kills")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    config = parse_config({**CONFIG, "federation": {"clients": 6, "rounds": options.rounds, "retries": 3}})
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    executor = RayExecutor(config, client_ids(6))
    watch = Watch(executor.server.handle)
    stop = threading.Event()
    kills = 0

    def kill_now_and_then() -> None:
        nonlocal kills
        while not stop.wait(options.every):
            victim = random_client(executor)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                kills += 1

    threading.Thread(target=kill_now_and_then, daemon=True).start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(Path(folder) / "run")
        store.create(config)
        Training(config, store, executor, watch).run_rounds(None)
        rounds = [line["round"] for line in store.history()]
    stop.set()
    first = max(1, options.rounds // 10)
    growth = [end / start for start, end in zip(watch.memory[first], watch.memory[options.rounds], strict=True)]
    for number in range(first, options.rounds + 1, max(1, options.rounds // 10)):
        print(f"round {number}: driver {watch.memory[number][0]:.0f} MB, server {watch.memory[number][1]:.0f} MB")
    print(
        f"{len(rounds)} rounds in {time.monotonic() - began:.0f} s, {kills} kills, {watch.retried} retries, "
        f"{watch.dropped} drops\n"
        f"resident MB after round {first} / {options.rounds}: "
        f"driver {watch.memory[first][0]:.0f} / {watch.memory[options.rounds][0]:.0f} (×{growth[0]:.2f}), "
        f"server {watch.memory[first][1]:.0f} / {watch.memory[options.rounds][1]:.0f} (×{growth[1]:.2f})"
    )
    ray.shutdown()
    return 0 if rounds == list(range(1, options.rounds + 1)) and max(growth) < 1.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
