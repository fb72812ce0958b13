"""Fifty short rounds of a coordinator and three sites over TLS, while sites are killed with SIGKILL and come back.

    python benchmarks/site_soak.py [--rounds 50] [--kill-every 5] [--serial]

Real processes: `fedppd train --listen` (on a Ray of its own unless --serial) and `fedppd site run`. The third site is
never killed, so that its memory can be told over the whole run. Prints the resident memory of the coordinator (with its
server and the sites' actors) and of that site after a tenth of the rounds and at the end, and fails if a round is
missing, a client was left out, or memory grew by more than a tenth.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from soak import resident_megabytes

from tests.sites.house import House

_ACTORS = ("ray::RayServer", "ray::RaySite")


def coordinator_megabytes(pid: int) -> float:
    """The driver, its server and the sites' mailboxes; not Ray's own daemons."""
    total = resident_megabytes(pid)
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(_ACTORS):
                total += resident_megabytes(child.pid)
        except (psutil.Error, OSError, StopIteration):
            continue  # just gone
    return total


def finished_rounds(out: Path) -> list[dict[str, object]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def soak(house: House, rounds: int, kill_every: int, serial: bool) -> tuple[list[dict[str, object]], dict, int]:
    """Records of the rounds, memory by round, kills."""
    out = house.folder / "run"
    config = house.config(evaluation={"every": 10, "ood": None}, resources={"start_timeout_s": 600})
    coordinator = house.coordinate(config, out, serial=serial)
    for index in range(3):
        house.join(index)
    sites = [house.site(index) for index in range(3)]
    memory: dict[int, tuple[float, float]] = {}
    kills, seen = 0, 0
    while coordinator.poll() is None and seen < rounds:
        time.sleep(0.05)
        now = len(finished_rounds(out))
        if now == seen:
            continue
        seen = now
        if seen < rounds:  # at the end they are about to leave
            memory[seen] = coordinator_megabytes(coordinator.pid), resident_megabytes(sites[2].pid)
        if seen % kill_every == 0 and seen < rounds:
            victim = random.randrange(2)
            time.sleep(random.uniform(0.0, 0.5))
            os.kill(sites[victim].pid, signal.SIGKILL)
            sites[victim].wait()
            sites[victim] = house.site(victim)
            kills += 1
        if seen % 5 == 0 and seen in memory:
            print(f"round {seen}: coordinator {memory[seen][0]:.0f} MB, site {memory[seen][1]:.0f} MB", flush=True)
    if coordinator.wait(300):
        raise RuntimeError(house.troubles())
    return finished_rounds(out), memory, kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kill-every", type=int, default=5, help="rounds between two kills")
    parser.add_argument("--serial", action="store_true", help="a coordinator without Ray")
    options = parser.parse_args()
    began, tenth = time.monotonic(), max(1, options.rounds // 10)
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder), rounds=options.rounds)
        try:
            rounds, memory, kills = soak(house, options.rounds, options.kill_every, options.serial)
        finally:
            house.close()
    growth = []
    for part, name in enumerate(("coordinator", "site")):
        first = statistics.median(value[part] for number, value in memory.items() if tenth <= number < 2 * tenth)
        last = statistics.median(value[part] for number, value in memory.items() if number > options.rounds - tenth)
        growth.append(last / first)
        print(f"{name}: {first:.0f} MB after a tenth of the rounds, {last:.0f} MB at the end (×{growth[-1]:.2f})")
    left_out = sum(int(str(record["failed"])) for record in rounds)
    print(f"{len(rounds)} rounds in {time.monotonic() - began:.0f} s, {kills} kills, {left_out} updates missing")
    return 0 if len(rounds) == options.rounds and not left_out and max(growth) < 1.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
