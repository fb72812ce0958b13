"""Where do the seconds from the command to the first round go?

    python benchmarks/startup.py [--clients 10] [--turns 3] [--short] [--json FILE]

A fresh process does what `fedppd train` does until its first round could begin, and notes when each stage is through:
clients that share an actor per core, then an actor each. Also the CPU time of every process by then: where all cores
are busy, that is what there is to save. Medians; rows from the data root (`FEDPPD_DATA`), or random images.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

STAGES = ("numpy and torch", "Ray's package", "our package", "data", "ray.init", "actors", "first state, counts")


def child(file: str) -> None:
    """Prints a line per stage; nothing is imported before it is timed."""

    def through(stage: str) -> None:
        print(f"@{stage}:{time.monotonic()}", flush=True)

    import numpy  # noqa: F401
    import torch  # noqa: F401

    through(STAGES[0])
    import ray

    through(STAGES[1])
    import fedppd_ray as fp
    from fedppd_ray.config.schema import client_ids
    from fedppd_ray.data.holdings import prepare_data
    from fedppd_ray.runtime.driver import connect
    from fedppd_ray.runtime.ray_executor import RayExecutor

    config = fp.load_config(file)
    through(STAGES[2])
    prepare_data(config)
    through(STAGES[3])
    connect(None)
    through(STAGES[4])
    executor = RayExecutor(config, client_ids(config.federation.clients))
    through(STAGES[5])
    executor.server.install(None)
    executor.clients.describe()
    through(STAGES[6])
    sys.stdin.readline()  # until its processes were counted
    executor.close()
    ray.shutdown()


def measure(file: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Wall seconds by stage, CPU seconds by process."""
    from watch import MARK, Watch

    mark = secrets.token_hex(8)
    watch, began = Watch(mark), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, MARK: mark},
        text=True,
    )
    stages: dict[str, float] = {}
    spent: Counter[str] = Counter()
    for line in process.stdout or ():
        if line.startswith("@"):
            stage, _, when = line[1:].rpartition(":")
            stages[stage] = float(when) - began - sum(stages.values())
            if stage == STAGES[-1] and process.stdin:
                for pid, seconds in watch.by_process().items():
                    spent[_name(pid)] += seconds
                process.stdin.write("\n")
                process.stdin.flush()
    watch.stop()
    if process.wait() or len(stages) < len(STAGES):
        raise RuntimeError(f"failed after {list(stages)}")
    return stages, dict(spent)


def _name(pid: int) -> str:
    """As an operator would call it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "ended"
    known = {
        "--child": "driver",
        "ray::RayClient": "client actors",
        "ray::RayServer": "server actor",
        "ray::IDLE": "spare workers",
        "gcs_server": "Ray: GCS",
        "monitor.py": "Ray: autoscaler, log monitor",
        "dashboard.py": "Ray: dashboard's API server",
        "DashboardAgent": "Ray: dashboard agent",
        "RuntimeEnvAgent": "Ray: runtime env agent",
        "raylet": "Ray: raylet",
    }
    return next((name for sign, name in known.items() if sign in words), "other")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return 0
    import yaml
    from harness import cifar_rows, cores, fedavg_config, median, parser_of, report, warn_of_company

    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--turns", type=int, help="3, in the short version 1")
    options = parser.parse_args()
    turns = options.turns or (1 if options.short else 3)
    warn_of_company()
    result: dict[str, Any] = {}
    with cifar_rows(40 * options.clients) as data, tempfile.TemporaryDirectory() as folder:
        for actors in (cores(), "auto"):
            file = Path(folder) / "config.yaml"
            config = fedavg_config(data, options.clients, 40, 1, resources={"actors": actors})
            file.write_text(yaml.safe_dump(config.values()), encoding="utf-8")
            taken = [measure(file) for _ in range(turns)]
            stages = {stage: median([wall[stage] for wall, _ in taken]) for stage in STAGES}
            names = sorted({name for _, spent in taken for name in spent})
            spent = {name: median([cpu.get(name, 0.0) for _, cpu in taken]) for name in names}
            share = "an actor each" if actors == "auto" else f"{actors} actors shared"
            total = sum(stages.values())
            print(f"{options.clients} clients, {share}: {total:.1f} s, {sum(spent.values()):.1f} s of CPU")
            print("  wall: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()))
            by_size = sorted(spent.items(), key=lambda item: -item[1])
            print("  CPU: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in by_size), flush=True)
            result[share] = {"wall_s": stages, "cpu_s": spent}
    report(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
