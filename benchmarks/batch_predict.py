"""How fast is a batch job on Ray Data, beside one process?

    python benchmarks/batch_predict.py RUN [--rows 200000] [--part-rows 5000] [--short] [--json FILE]

The same rows (noise of the student's shape, in one .npy file) by `fedppd predict --out` on all cores of this machine,
by the same command with --serial, which gives the network all cores too, and so on one core. Start-up counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
_PIECE = 10_000


def write_rows(path: Path, rows: int, card: dict) -> None:
    size = card["input"]
    sides = [size["height"], size["width"]] + ([size["channels"]] if size["channels"] > 1 else [])
    made = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, *sides))
    generator = np.random.default_rng(0)
    for start in range(0, rows, _PIECE):
        part = made[start : start + _PIECE]
        part[:] = generator.integers(0, 256, part.shape, np.uint8)
    made.flush()


def timed(run: Path, source: Path, out: Path, part_rows: int, *options: str, threads: int | None = None) -> float:
    command = [sys.executable, "-m", "fedppd_ray", "predict", str(run), str(source), "--out", str(out)]
    environment = {"RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)} | os.environ
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--part-rows", str(part_rows), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--part-rows", type=int, default=5_000)
    parser.add_argument("--short", action="store_true", help="20,000 rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    card = json.loads((arguments.run / "student" / "model.json").read_text())
    rows = 20_000 if arguments.short else arguments.rows
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.npy", rows, card)
        ways = {
            "Ray Data": ([], None),
            "one process, all cores": (["--serial"], None),
            "one process, one core": (["--serial"], 1),
        }
        print(f"{rows:,} rows, {os.cpu_count()} cores\n{'':28}{'seconds':>10}{'rows/s':>10}")
        for way, (options, threads) in ways.items():
            seconds = timed(
                arguments.run, folder / "rows.npy", folder / way, arguments.part_rows, *options, threads=threads
            )
            figures[way] = {"seconds": seconds, "rows_a_second": rows / seconds}
            print(f"{way:28}{seconds:>10.1f}{rows / seconds:>10,.0f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
