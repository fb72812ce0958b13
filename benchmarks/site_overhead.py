"""What does HTTPS cost a round? Three of the authors' CIFAR-10 clients as sites (processes of their own, TLS on
loopback, a coordinator on Ray) against the same three as Ray actors, side by side, in turns, in one run.

    python benchmarks/site_overhead.py [--turns 5] [--rows 2100] [--epochs 10] [--short] [--json FILE]

A round is what `fedppd train` does: broadcast, local updates, screening, averaging, checkpoint. Both ways all three
clients compute at once, whatever the number of cores (sites know nothing of each other; Ray is told that it has a core
for each), and must end with the same bits. The rows are CIFAR-10's from the data root (`FEDPPD_DATA`), or random images
of its shape.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from harness import NEVER, PROJECT, Rows, Silent, cifar_rows, median, parser_of, report, warn_of_company

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.runs.store import RunStore
from fedppd_ray.runs.training import Training
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.runtime.site_actors import RayBox
from fedppd_ray.sites.agent import join
from fedppd_ray.sites.coordinator import Listen, open_door, wait_for_sites
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.home import Home
from fedppd_ray.sites.mailbox import Box
from fedppd_ray.sites.tls import Tls
from tests.sites.house import digest, free_port, make_certificates

CLIENTS = client_ids(3)
SITES = dict(zip(CLIENTS, ("site-a", "site-b", "site-c"), strict=True))
WARM = 1  # rounds of each kind that do not count
_TRAINED = re.compile(r"round (\d+): trained in ([0-9.]+) s")


def config_of(data: Rows, rows: int, epochs: int, rounds: int, clients: dict[str, Any]) -> Config:
    """The authors' CIFAR-10 client."""
    paper = yaml.safe_load((PROJECT / "configs" / "cifar10.yaml").read_text(encoding="utf-8"))
    return parse_config(
        {
            "name": "benchmark",
            "data": {**data.section, "partition": {"kind": "iid", "rows_per_client": rows}},
            "federation": {"clients": len(CLIENTS), "rounds": rounds},
            "client": {**paper["client"], "epochs": epochs},
            "teacher": paper["teacher"],
            "student": paper["student"],
            "evaluation": {"every": NEVER, "ood": None},
            "resources": {"client_cpus": 1, "server_cpus": 1, "start_timeout_s": 300},
            "clients": clients,
        }
    )


def deal(config: Config, folder: Path) -> dict[str, Path]:
    """Each client's rows in a folder of its own."""
    holdings, places = Holdings(config, CLIENTS), {}
    for client in CLIENTS:
        split, places[client] = holdings.of(client), folder / f"rows-{client}"
        places[client].mkdir()
        np.save(places[client] / "images.npy", np.ascontiguousarray(split.images.transpose(0, 2, 3, 1)))
        np.save(places[client] / "labels.npy", np.asarray(split.labels))
    return places


class Turns:
    """Lets one training do a round while the others wait; whoever fails lets all go."""

    def __init__(self, count: int) -> None:
        self._changed, self._count, self._whose, self.broken = threading.Condition(), count, 0, False

    def wait(self, me: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._whose == me or self.broken)
            if self.broken:
                raise RuntimeError("the other training has failed")

    def hand_over(self, broken: bool = False) -> None:
        with self._changed:
            self._whose, self.broken = (self._whose + 1) % self._count, self.broken or broken
            self._changed.notify_all()


class Watch(Silent):
    def __init__(self, turns: Turns, me: int) -> None:
        self._turns, self._me = turns, me
        self.rounds: list[float] = []
        self.longest: list[float] = []  # of its clients, as their actor saw it

    def round_started(self, *_: Any) -> None:
        self._turns.wait(self._me)
        self._clients: list[float] = []
        self._began = time.monotonic()

    def client_done(self, receipt: Any) -> None:
        self._clients.append(receipt.metrics["seconds"])

    def round_finished(self, record: Any) -> None:
        self.rounds.append(time.monotonic() - self._began)
        self.longest.append(max(self._clients))
        self._turns.hand_over()


def train(config: Config, executor: RayExecutor, watch: Watch, turns: Turns, out: Path) -> str:
    """The digest of the student."""
    try:
        store = RunStore(out)
        store.create(config)
        Training(config, store, executor, watch).run_rounds(None)
    except BaseException:
        turns.hand_over(broken=True)
        raise
    return digest(out)


@contextlib.contextmanager
def sites(config: Config, executor: RayExecutor, rows: dict[str, Path], folder: Path) -> Iterator[list[Path]]:
    """A door, and three site processes behind it; yields where they log."""
    ca, certificate, key = make_certificates(folder)
    guests, port = Guests(folder / "guests"), free_port()
    boxes: dict[str, Box] = {site: RayBox(handle) for site, handle in executor.hosts.site_handles().items()}
    listen = Listen("127.0.0.1", port, certificate, key, guests.folder)
    logs, processes = [], []
    with open_door(listen, guests, boxes, None) as gateway:
        try:
            for client, site in SITES.items():
                home = Home(folder / site)
                home.init()
                join(home, site, f"https://127.0.0.1:{port}", guests.invite(site, 1.0), Tls(str(ca)))
                arguments = ["site", "run", "--home", str(home.folder), "--data", str(rows[client]), "--once"]
                logs.append(folder / f"{site}.log")
                with logs[-1].open("wb") as out:
                    command = [sys.executable, "-m", "fedppd_ray", *arguments]
                    processes.append(subprocess.Popen(command, cwd=PROJECT, stdout=out, stderr=out))
            wait_for_sites(config, lambda: gateway.heard)
            yield logs
        except BaseException:
            for process in processes:
                process.kill()
            raise
    for process in processes:
        process.wait(60)


def trained(logs: list[Path]) -> dict[int, float]:
    """Round → seconds of training at the slowest site, by the sites' own clocks."""
    found: dict[int, float] = {}
    for log in logs:
        for number, seconds in _TRAINED.findall(log.read_text()):
            found[int(number)] = max(found.get(int(number), 0.0), float(seconds))
    return found


def measure(data: Rows, rows: int, epochs: int, turns: int, folder: Path) -> dict[str, Any]:
    rounds = turns + WARM + 1  # the last one evaluates
    places = deal(config_of(data, rows, epochs, rounds, {}), folder)
    on_ray = config_of(data, rows, epochs, rounds, {name: {"data": str(place)} for name, place in places.items()})
    at_sites = config_of(data, rows, epochs, rounds, {name: {"site": site} for name, site in SITES.items()})
    ray_executor, site_executor = RayExecutor(on_ray, CLIENTS), RayExecutor(at_sites, CLIENTS, (), "ab" * 16)
    gate = Turns(2)
    watches = Watch(gate, 0), Watch(gate, 1)
    with sites(at_sites, site_executor, places, folder) as logs, ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, on_ray, ray_executor, watches[0], gate, folder / "ray")
        second = pool.submit(train, at_sites, site_executor, watches[1], gate, folder / "sites")
        same = first.result() == second.result()
        worked = trained(logs)
    counted = slice(WARM, -1)
    actor, site = (watch.rounds[counted] for watch in watches)
    return {
        "ray_s": median(actor),
        "ray_compute_s": median(watches[0].longest[counted]),
        "sites_s": median(site),
        "sites_compute_s": median([worked[number] for number in range(1 + WARM, rounds)]),
        "sites_answer_s": median(watches[1].longest[counted]),
        "ratios": [over / plain for over, plain in zip(site, actor, strict=True)],
        "ratio": median(site) / median(actor),
        "same_bits": same,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, help="rounds of each kind that count; 5, in the short version 3")
    parser.add_argument("--rows", type=int, default=2100, help="per client")
    parser.add_argument("--epochs", type=int, help="10 as the authors, in the short version 2")
    options = parser.parse_args()
    turns, epochs = options.turns or (3 if options.short else 5), options.epochs or (2 if options.short else 10)
    warn_of_company()

    ray.init(address="local", num_cpus=len(CLIENTS) + 2, include_dashboard=False, log_to_driver=False)
    with cifar_rows(len(CLIENTS) * options.rows) as data, tempfile.TemporaryDirectory() as folder:
        print(
            f"{len(CLIENTS)} × {options.rows:,} rows, {epochs} epochs, {data.what}, median of {turns} turns", flush=True
        )
        found = measure(data, options.rows, epochs, turns, Path(folder))
    ray.shutdown()
    print(
        f"a round with Ray actors {found['ray_s']:.2f} s, of it the slowest client {found['ray_compute_s']:.2f} s\n"
        f"a round with sites      {found['sites_s']:.2f} s, of it the slowest training "
        f"{found['sites_compute_s']:.2f} s, until its update is there {found['sites_answer_s']:.2f} s\n"
        f"ratio {found['ratio']:.3f} ({min(found['ratios']):.2f}–{max(found['ratios']):.2f}), aim 1.15; "
        f"{'the same bits' if found['same_bits'] else 'DIFFERENT BITS'}"
    )
    report(found | {"rows": data.what}, options.json)
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
