"""Does the service stay quick for honest callers while others send the worst bodies there are?

    python benchmarks/serve_attack.py RUN [--seconds 20] [--attackers 4] [--short] [--json FILE]

One honest client asks for one image after the other, by JSON and by PNG in turn, and looks at /healthz: first alone,
then while the attackers, each a process with one connection, send the bodies of `attack_bodies.py` as fast as they are
answered. Everything runs on this machine; attackers have cores of their own elsewhere, so here they run at low
priority, and what they cost is what the service and its proxy do for them.

Aims: p99 of the honest client below 5 times its quiet value, /healthz below 100 ms, nothing fails.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from attack_bodies import Attack, attacks, picture
from serve_load import running

_PREPARE_SECONDS = 2.0
_NICENESS = 10
_WIDEST_RATIO, _LONGEST_HEALTH_MS = 5.0, 100.0


@dataclass(frozen=True)
class Waits:
    """Milliseconds."""

    requests: int
    p50: float
    p99: float
    health_p50: float
    health_longest: float
    failed: int


def attack(port: int, bodies: list[Attack], stop: Event) -> None:
    """One body after the other; a connection that the service closes is opened again."""
    os.nice(_NICENESS)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not stop.is_set():
        for path, media_type, body in bodies:
            if stop.is_set():
                break
            try:
                connection.request("POST", path, body, {"Content-Type": media_type})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()


def honest(port: int, seconds: float, sides: tuple[int, int]) -> Waits:
    pixels = np.random.default_rng(0).integers(0, 256, (1, *sides))
    requests = [
        ("POST", "/predict", json.dumps({"instances": pixels.tolist()}).encode(), "application/json"),
        ("POST", "/predict", picture(28, "PNG"), "image/png"),
    ]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    waits: list[float] = []
    health: list[float] = []
    failed = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for method, path, body, media_type in [*requests, ("GET", "/healthz", None, "")]:
            started = time.perf_counter()
            connection.request(method, path, body, {"Content-Type": media_type} if body else {})
            answer = connection.getresponse()
            answer.read()
            (waits if body else health).append(1000 * (time.perf_counter() - started))
            failed += answer.status != 200
    connection.close()
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    return Waits(len(waits), float(p50), float(p99), float(np.median(health)), max(health), failed)


def besieged(port: int, model: str, sides: tuple[int, int], attackers: int, seconds: float, scale: float) -> Waits:
    """Each attacker begins with another body, so that at any time several kinds are on their way."""
    bodies = list(attacks(model, sides, scale).values())
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    parts = [bodies[number * len(bodies) // attackers :] + bodies for number in range(attackers)]
    processes = [context.Process(target=attack, args=(port, part, stop), daemon=True) for part in parts]
    for process in processes:
        process.start()
    try:
        time.sleep(_PREPARE_SECONDS + 2)  # the attackers' imports
        return honest(port, seconds, sides)
    finally:
        stop.set()
        for process in processes:
            process.join(timeout=5)
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--attackers", type=int, default=4)
    parser.add_argument("--short", action="store_true", help="5 seconds, bodies of a quarter of the size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    seconds, scale = (5.0, 0.25) if arguments.short else (arguments.seconds, 1.0)
    card = json.loads((arguments.run / "student" / "model.json").read_text())
    if card["input"]["channels"] != 1:
        raise SystemExit("this benchmark sends grey images; give a run on a grey data set")
    sides = (card["input"]["height"], card["input"]["width"])
    with running("service", arguments.run) as port:
        honest(port, _PREPARE_SECONDS, sides)
        quiet = honest(port, seconds, sides)
        siege = besieged(port, card["name"], sides, arguments.attackers, seconds, scale)
    print(f"{'':24}{'requests':>10}{'p50 ms':>9}{'p99 ms':>9}{'healthz p50':>13}{'longest':>9}{'failed':>8}")
    for name, row in (("quiet", quiet), (f"{arguments.attackers} attackers", siege)):
        print(
            f"{name:24}{row.requests:>10}{row.p50:>9.2f}{row.p99:>9.2f}"
            f"{row.health_p50:>13.2f}{row.health_longest:>9.2f}{row.failed:>8}"
        )
    ratio = siege.p99 / quiet.p99
    holds = ratio < _WIDEST_RATIO and siege.health_longest < _LONGEST_HEALTH_MS and not siege.failed
    print(f"\np99 under attack / quiet: {ratio:.1f} (aim: below {_WIDEST_RATIO:g})")
    print(f"longest /healthz: {siege.health_longest:.1f} ms (aim: below {_LONGEST_HEALTH_MS:g})")
    if arguments.json:
        figures = {"quiet": asdict(quiet), "siege": asdict(siege), "ratio": ratio, "holds": holds}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
