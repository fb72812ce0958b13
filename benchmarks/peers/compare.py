"""The same federated averaging by fedppd_ray, Flower and pfl, side by side on this machine. `make bench-peers`

    python benchmarks/peers/compare.py [--cells 10x2000 100x200 1000x40] [--rounds 5] [--only ours flower ...]
                                       [--json FILE] [--short]

A cell is clients × rows. Everybody has the same rows, starts from the same weights, sees each client's rows in the
same order (ours, written to a file), in batches of 40, by SGD of the same rate; the largest difference between the
weights that were learnt, and the accuracy, say so. Peers have a venv each (venvs/, built once) with this torch; their
programs are flower_run.py and pfl_run.py.

Shown: clients per second and round time, of the fastest round but the first and the last (other work on the machine can
only slow a round down; the JSON has every round); CPU time per client of all processes, median; round / ideal, where
the ideal is the same local updates in one bare process a core, nothing sent (each by its own kind of local update:
ours, or the usual PyTorch loop that the peers are given); start, from the command to the end of round 1, less one
round; peak memory of all processes. Rows: FEDPPD_DATA, or random images.
"""

import importlib.metadata
import itertools
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from harness import (  # noqa: E402
    PROJECT,
    Holdings,
    PlainProcesses,
    Rows,
    build_method,
    cifar_rows,
    client_ids,
    cores,
    fedavg_config,
    median,
    parser_of,
    report,
    warn_of_company,
)
from watch import MARK, Watch  # noqa: E402
from work import Work, local_update, network, read_work  # noqa: E402

from fedppd_ray.config.schema import Config  # noqa: E402
from fedppd_ray.data.holdings import dataset_of  # noqa: E402
from fedppd_ray.seeding import generator_for  # noqa: E402

VENVS = HERE / "venvs"
PEERS = {"flower": "flwr[simulation]", "pfl": "pfl"}  # venv → what pip installs
EDGES = 2  # rounds that do not count: the first warms up, the last one evaluates
CELLS = ["10x2000", "100x200", "1000x40"]
LIMIT_S = 600


# --- contenders ------------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Contender → its command, but for its name, which comes last or where {} is."""
    flower, pfl = (str(VENVS / peer / "bin") for peer in ("flower", "pfl"))
    return {
        "ours": [sys.executable, "ours_run.py", "{}"],
        "ours_serial": [sys.executable, "ours_run.py", "{}", "--serial"],
        "flower": [f"{flower}/python", "flower_run.py", "{}", str(cores())],
        "pfl": [f"{pfl}/torchrun", "--standalone", "--nproc_per_node", str(cores()), "pfl_run.py", "{}"],
        "pfl_one": [f"{pfl}/python", "pfl_run.py", "{}"],
    }


TITLES = {
    "ours": "fedppd_ray, an actor per core",
    "ours_serial": "fedppd_ray --serial, one process",
    "flower": "Flower, an actor per core",
    "pfl": "pfl, a process per core",
    "pfl_one": "pfl, one process",
}


def install(peer: str) -> None:
    """A venv with the peer and the very torch that runs here."""
    stamp, venv = VENVS / f"{peer}.done", VENVS / peer
    wanted = [PEERS[peer], f"torch=={importlib.metadata.version('torch')}"]
    if stamp.exists() and stamp.read_text(encoding="utf-8") == " ".join(wanted):
        return
    print(f"installing {' '.join(wanted)} into {venv.relative_to(PROJECT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *wanted], check=True)
    stamp.write_text(" ".join(wanted), encoding="utf-8")


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("torch", "ray", "numpy")}
    found["python"] = sys.version.split()[0]
    for peer, package in (("flower", "flwr"), ("flower", "ray"), ("pfl", "pfl")):
        python = VENVS / peer / "bin" / "python"
        if python.exists():
            ask = f"from importlib.metadata import version; print(version('{package}'))"
            answer = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
            found[package if package != "ray" else "flower's ray"] = answer.stdout.strip()
    return found


# --- the work --------------------------------------------------------------------------------------------------


def prepare(folder: Path, data: Rows, clients: int, rows: int, rounds: int) -> Config:
    """Write down what is to be done, as our own run would do it."""
    shared = {"actors": min(cores(), clients)}
    config = fedavg_config(data, clients, rows, rounds, resources=shared)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.values()), encoding="utf-8")
    names = client_ids(clients)
    holdings, test, method = Holdings(config, names), dataset_of(config).test, build_method(config)
    splits = [holdings.of(name) for name in names]
    info, baseline = config.dataset, method.baseline
    work = Work(
        clients, rows, rounds, config.client.batch_size, baseline.rate, baseline.weight_decay, info.mean, info.std
    )
    work.save(
        folder,
        images=np.stack([split.images for split in splits]),
        labels=np.stack([split.labels for split in splits]),
        orders=np.array([[_order(config, name, rows, number + 1) for name in names] for number in range(rounds)]),
        test_images=test.images,
        test_labels=test.labels,
        start=method.initial_models()["model"],
    )
    return config


def _order(config: Config, client: str, rows: int, round_id: int) -> Any:
    """Of the rows in an epoch: the first that a client's generator draws."""
    return torch.randperm(rows, generator=generator_for(config.seed, "local", round_id, client)).numpy()


# --- measuring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    rounds_s: list[float]
    cpu_s: list[float]  # of a round, all processes
    start_s: float
    peak_mb: float
    accuracy: float


def run(name: str, folder: Path, rounds: int) -> Figures:
    """One contender, from its command to its end."""
    mark = secrets.token_hex(8)
    command = [name if part == "{}" else part for part in commands()[name]]
    environment = {
        **os.environ,
        "PEERS_WORK": str(folder),
        MARK: mark,
        "PYTHONPATH": os.pathsep.join((str(HERE), str(PROJECT))),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    watch, began = Watch(mark), time.monotonic()
    stamps: list[tuple[float, float]] = []
    seen: list[str] = []
    accuracy = None
    process = subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout or ():
        seen.append(line)
        if line.startswith("@round"):
            stamps.append((float(line.split()[2]), watch.cpu_seconds()))
        elif line.startswith("@accuracy"):
            accuracy = float(line.split()[1])
        if time.monotonic() - began > LIMIT_S:
            process.terminate()
    process.wait()
    watch.stop()
    if process.returncode or accuracy is None or len(stamps) < rounds:
        raise SystemExit(f"{name} failed:\n{''.join(seen[-40:])}")
    between = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(stamps[1:rounds])]
    seconds = [wall for wall, _ in between]
    return Figures(seconds, [cpu for _, cpu in between], stamps[1][0] - began - min(seconds), watch.peak_mb, accuracy)


def _bare_clients(folder: str, clients: Sequence[int], pipe: Connection) -> None:
    torch.set_num_threads(1)
    work, start = read_work(folder), network(folder).state_dict()
    module = network(folder)

    def everybody() -> None:
        for client in clients:
            module.load_state_dict(start)
            local_update(folder, work, module, client, 1)

    everybody()  # warms up, and loads the rows
    pipe.send(None)
    while pipe.recv():
        began = time.perf_counter()
        everybody()
        pipe.send(time.perf_counter() - began)


class BareProcesses:
    """The usual PyTorch loop, a process a core; as harness.PlainProcesses does our local update."""

    def __init__(self, folder: Path, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for core in range(cores()):
            pipe, theirs = context.Pipe()
            arguments = (str(folder), range(clients)[core :: cores()], theirs)
            context.Process(target=_bare_clients, args=arguments, daemon=True).start()
            self._pipes.append(pipe)
        for pipe in self._pipes:
            pipe.recv()

    def turn(self) -> float:
        for pipe in self._pipes:
            pipe.send(True)
        return sum(float(pipe.recv()) for pipe in self._pipes) / len(self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)


def ideals(folder: Path, config: Config, turns: int) -> dict[str, float]:
    """Seconds of a round without any framework, by our local update and by the usual loop, in turns."""
    bare, plain = BareProcesses(folder, config.federation.clients), PlainProcesses(config)
    taken = [(plain.turn(), bare.turn()) for _ in range(turns + 1)][1:]
    bare.close()
    plain.close()
    ours, usual = (min(values) for values in zip(*taken, strict=True))
    return {"ours": ours, "usual": usual}


def measure(data: Rows, clients: int, rows: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = prepare(folder, data, clients, rows, rounds)
        ideal = ideals(folder, config, rounds - EDGES)
        print(
            f"\n{clients} × {rows:,}: ideal {ideal['ours']:.2f} s by our local update, {ideal['usual']:.2f} s by the "
            f"usual loop\n{'':34}{'clients/s':>10}{'round s':>9}{'ms CPU':>8}{'/ ideal':>9}{'start s':>9}"
            f"{'peak MB':>9}{'accuracy':>10}{'differs by':>12}",
            flush=True,
        )
        cell: dict[str, Any] = {"ideal_s": ideal}
        reference = None
        for name in names:
            figures = run(name, folder, rounds)
            learnt = np.load(folder / f"learnt_{name}.npy")
            reference = learnt if reference is None else reference
            cell[name] = _row(figures, clients, ideal["ours" if name.startswith("ours") else "usual"])
            cell[name]["differs_by"] = float(np.abs(learnt - reference).max())
            _show(name, cell[name])
    return cell


def _row(figures: Figures, clients: int, ideal: float) -> dict[str, Any]:
    seconds = min(figures.rounds_s)
    return {
        "clients_per_s": clients / seconds,
        "round_s": seconds,
        "rounds_s": figures.rounds_s,
        "cpu_ms_per_client": 1000 * median(figures.cpu_s) / clients,
        "over_ideal": seconds / ideal,
        "start_s": figures.start_s,
        "peak_mb": figures.peak_mb,
        "accuracy": figures.accuracy,
    }


def _show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{TITLES[name]:34}{row['clients_per_s']:>10.1f}{row['round_s']:>9.2f}{row['cpu_ms_per_client']:>8.1f}"
        f"{row['over_ideal']:>9.2f}{row['start_s']:>9.1f}{row['peak_mb']:>9,.0f}{row['accuracy']:>9.2f}%"
        f"{row['differs_by']:>12.0e}",
        flush=True,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="CLIENTSxROWS")
    parser.add_argument("--rounds", type=int, help="all but the first and the last count; 7, in the short version 4")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES), help="these contenders")
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.short else 7)
    for peer in PEERS:
        if any(name.startswith(peer) for name in options.only):
            install(peer)
    found = versions()
    print(", ".join(f"{name} {version}" for name, version in found.items()), f"{cores()} cores", sep="; ")
    warn_of_company()
    cells = [tuple(map(int, cell.split("x"))) for cell in options.cells]
    result: dict[str, Any] = {"versions": found}
    with cifar_rows(max(clients * rows for clients, rows in cells)) as data:
        print(f"FedAvg, one local epoch of the CIFAR-10 teacher, {data.what}, {rounds} rounds")
        for clients, rows in cells:
            result[f"{clients}x{rows}"] = measure(data, clients, rows, rounds, options.only)
    report(result | {"rows": data.what}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
