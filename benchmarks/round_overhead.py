"""What does Ray cost a round? A FedAvg round as `fedppd train` runs it (broadcast, local updates in actors, screening,
averaging, checkpoint) against two ideals, side by side, in turns, in one run:

1. the sum of the clients' compute, as their actors measured it in that very round, divided by the cores;
2. the same local updates in one plain process per core, nothing sent, nothing averaged: what is lost where an actor
   computes more slowly than a plain process shows here too, and so does the noise between two moments of a machine.

    python benchmarks/round_overhead.py [--turns 7] [--cases 10x2000 200x40] [--short] [--json FILE]

A case is clients × rows. Up to 20 clients have an actor each, more share one a core. The rows are CIFAR-10's from
the data root (`FEDPPD_DATA`), or random images of its shape. Also: from the command to the first round.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from harness import (
    EDGES,
    PROJECT,
    Rows,
    cifar_rows,
    cores,
    fedavg_config,
    median,
    parser_of,
    report,
    turns_beside,
    warn_of_company,
)

from fedppd_ray.config.schema import Config

OWN_ACTOR = 20  # clients; with more they share


def measure(config: Config) -> dict[str, Any]:
    """Rounds against both ideals."""
    turns = turns_beside(config)
    rounds, saving, plainly = ([getattr(turn, key) for turn in turns] for key in ("round", "saving", "plain"))
    compute = [sum(turn.compute) / cores() for turn in turns]
    ratios, plain_ratios = ([a / b for a, b in zip(rounds, ideal, strict=True)] for ideal in (compute, plainly))
    return {
        "round_s": median(rounds),
        "compute_s": median(compute),
        "plain_s": median(plainly),
        "saving_s": median(saving),
        "ratio": median(ratios),
        "ratios": ratios,
        "plain_ratio": median(plain_ratios),
        "plain_ratios": plain_ratios,
        "overhead_ms_per_client": 1000 * (median(rounds) - median(compute)) / config.federation.clients,
    }


def seconds_to_first_round(config: Config) -> float:
    """From the command until it says that the run has started: imports, Ray, actors, data."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config.values()), encoding="utf-8")
        command = [sys.executable, "-m", "fedppd_ray", "train", str(file), "--out", str(Path(folder) / "run")]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seen = []
        started = None
        for line in process.stdout or ():
            seen.append(line)
            if started is None and f"{config.federation.clients} clients with" in line:
                started = time.monotonic() - began
        if process.wait() or started is None:
            raise RuntimeError("the run failed:\n" + "".join(seen))
        return started


def config_of(data: Rows, clients: int, rows: int, rounds: int) -> Config:
    more = {} if clients <= OWN_ACTOR else {"resources": {"actors": cores()}}
    return fedavg_config(data, clients, rows, rounds, **more)


def _spread(middle: float, values: list[float]) -> str:
    return f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, help="rounds that count; 7, in the short version 3")
    parser.add_argument("--cases", nargs="+", default=["10x2000", "200x40"], metavar="CLIENTSxROWS")
    options = parser.parse_args()
    turns = options.turns or (3 if options.short else 7)
    cases = [tuple(map(int, case.split("x"))) for case in options.cases]
    warn_of_company()
    result: dict[str, Any] = {}
    with cifar_rows(max(clients * rows for clients, rows in cases)) as data:
        print(
            f"FedAvg, one local epoch of the CIFAR-10 teacher, {data.what}, {cores()} cores, median of {turns} turns\n"
        )
        print(
            f"{'clients × rows':>16}{'round s':>10}{'compute s':>11}{'plain s':>9}{'saving s':>10}{'ms/client':>11}"
            f"   round / compute   round / plain"
        )
        for clients, rows in cases:
            figures = measure(config_of(data, clients, rows, turns + EDGES))
            result[f"{clients}x{rows}"] = figures
            print(
                f"{f'{clients} × {rows:,}':>16}{figures['round_s']:>10.3f}{figures['compute_s']:>11.3f}"
                f"{figures['plain_s']:>9.3f}{figures['saving_s']:>10.3f}{figures['overhead_ms_per_client']:>11.2f}   "
                f"{_spread(figures['ratio'], figures['ratios'])}  "
                f"{_spread(figures['plain_ratio'], figures['plain_ratios'])}",
                flush=True,
            )
        print()
        for actors in ("auto", cores()):
            config = fedavg_config(data, 10, 40, 1, resources={"actors": actors})
            starts = [seconds_to_first_round(config) for _ in range(1 if options.short else 3)]
            result[f"first_round_s_actors_{actors}"] = median(starts)
            share = "one actor each" if actors == "auto" else f"{actors} actors shared"
            print(f"from the command to the first round, 10 clients, {share}: {median(starts):.1f} s", flush=True)
    report(result | {"rows": data.what}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
