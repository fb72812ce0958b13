"""How does a round grow with its clients? Measured here, then projected to clusters.

    python benchmarks/scaling.py [--clients 10 30 100 300 1000] [--rows 40] [--turns 3] [--raylets 4 8]
                                 [--short] [--json FILE]

Measured: FedAvg rounds of virtual clients that share one actor per core, against the ideal (the same local updates in
one plain process per core, in turns; see round_overhead.py). A round that scales costs the same per client,
however many there are.

Also measured: what the driver computes for a call to an actor, with the clients on 4 and 8 raylets, all on this
machine. They share its cores, so this tells overheads and no speed.

PROJECTED, not measured: rounds on clusters, by a queueing model. Actors take bundles of clients from one queue as they
become free; the driver serves one actor after the other, the server folds one update after the other. Its four numbers
(compute, driver and server seconds per client, fixed seconds per round) come from the measurement in the same run. The
network is not in it.
"""

import heapq
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
from harness import (
    EDGES,
    cifar_rows,
    cores,
    fedavg_config,
    median,
    parser_of,
    raylets,
    report,
    turns_beside,
    turns_on,
    warn_of_company,
)

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.aggregate import Mean
from fedppd_ray.federation.types import ClientUpdate, Receipt
from fedppd_ray.methods.fedavg import ROLE
from fedppd_ray.runtime.bundles import bundle_size

CLUSTERS = (2, 8, 32, 128, 512)  # cores


# --- the model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    compute: float  # a client, of one core
    driver: float  # the driver's part in one call to an actor
    fold: float  # the server's part in one update: screened twice, added once
    fixed: float  # of a round, whoever takes part: broadcast, the new state, the checkpoint


def projected_seconds(clients: int, actors: int, costs: Costs) -> float:
    """A round by the queueing model: `actors` draw bundles from a queue, driver and server serve one at a time."""
    free = [0.0] * actors  # when each actor is free again
    driver = server = 0.0  # when these are
    waiting = clients
    while waiting:
        size = bundle_size(waiting, actors, costs.compute)
        waiting -= size
        driver = max(driver, heapq.heappop(free)) + costs.driver
        done = driver + size * costs.compute
        heapq.heappush(free, done)
        # Folded in the order of the queue. Bundles end nearly in that order, and who ends early waits for nobody else.
        server = max(server, done) + size * costs.fold
    return costs.fixed + server


# --- the measurement -------------------------------------------------------------------------------------------


def measure(config: Config) -> dict[str, float]:
    turns = turns_beside(config)
    return {
        "round_s": median([turn.round for turn in turns]),
        "ideal_s": median([turn.plain for turn in turns]),
        "ratio": median([turn.round / turn.plain for turn in turns]),
        "compute_s": median([median(turn.compute) for turn in turns]),
        "driver_s": median([turn.driver for turn in turns]),
    }


def driver_costs(config: Config, nodes: int) -> dict[str, float]:
    """The driver's CPU time with an actor on each of so many raylets, of a call and of a client."""
    turns = turns_on(raylets(nodes), config)
    compute = median([median(turn.compute) for turn in turns])
    spent, clients = median([turn.driver for turn in turns]), config.federation.clients
    return {
        "round_s": median([turn.round for turn in turns]),
        "call_s": spent / calls(clients, nodes, compute),
        "client_s": spent / clients,
        "calls": calls(clients, nodes, compute),
    }


def fold_seconds(size: int, repeats: int = 200) -> float:
    """The server's own work for one update of this size: two screens and an addition."""
    from fedppd_ray.federation.screen import refusal

    vector = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    update = ClientUpdate(Receipt("client-00", 1, 40), {ROLE: vector})
    average = Mean({ROLE: size})
    began = time.perf_counter()
    for _ in range(repeats):
        for _ in range(2):
            refusal("client-00", update, 1, {ROLE: size})
        average.add(update.models, update.receipt.rows)
    return (time.perf_counter() - began) / repeats


def calls(clients: int, actors: int, compute: float) -> int:
    """How many bundles a round of that many clients makes."""
    count = 0
    while clients > 0:
        clients -= bundle_size(clients, actors, compute)
        count += 1
    return count


def fitted(measured: dict[int, dict[str, float]], fold: float) -> Costs:
    """A line through the measured rounds: its start is fixed, its slope is what a client costs the cores, all in.

    All in: also what Ray's own processes, the driver and the server took of these cores, so the projection errs on
    the slow side. The driver's seconds are its process's CPU time.
    """
    clients = np.array(list(measured))
    slope, fixed = np.polyfit(clients, [row["round_s"] for row in measured.values()], 1)
    most = measured[int(clients[-1])]
    driver = most["driver_s"] / calls(int(clients[-1]), cores(), most["compute_s"])
    return Costs(cores() * float(slope), driver, fold, max(0.0, float(fixed)))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", help="10 30 100 300 1000, in the short version 10 100")
    parser.add_argument("--rows", type=int, default=40, help="of each client")
    parser.add_argument("--raylets", type=int, nargs="*", help="4 8, in the short version none")
    parser.add_argument("--turns", type=int, help="rounds that count; 3, in the short version 2")
    options = parser.parse_args()
    clients = options.clients or ([10, 100] if options.short else [10, 30, 100, 300, 1000])
    turns = options.turns or (2 if options.short else 3)
    nodes = options.raylets if options.raylets is not None else ([] if options.short else [4, 8])
    warn_of_company()
    measured: dict[int, dict[str, float]] = {}
    with cifar_rows(max(clients) * options.rows) as data:
        print(f"FedAvg, {options.rows} rows of {data.what} a client, {cores()} cores, median of {turns} turns\n")
        print(f"{'clients':>8}{'round s':>10}{'ideal s':>10}{'ms/client':>11}   round / ideal")
        for count in clients:
            resources = {"actors": min(cores(), count)}
            config = fedavg_config(data, count, options.rows, turns + EDGES, resources=resources)
            row = measured[count] = measure(config)
            each = 1000 * row["round_s"] / count
            print(
                f"{count:>8,}{row['round_s']:>10.3f}{row['ideal_s']:>10.3f}{each:>11.2f}   {row['ratio']:.2f}",
                flush=True,
            )
        drivers = {}
        for count in nodes:
            config = fedavg_config(data, clients[-1], options.rows, turns + EDGES, resources={"actors": count})
            row = drivers[count] = driver_costs(config, count)
            print(
                f"{count} raylets, {clients[-1]:,} clients: {row['calls']} calls, of the driver "
                f"{1000 * row['call_s']:.2f} ms per call, {1000 * row['client_s']:.3f} ms per client",
                flush=True,
            )
    costs = fitted(measured, fold_seconds(62006))
    if drivers:  # the dearest that was seen
        costs = replace(costs, driver=max(costs.driver, *(row["call_s"] for row in drivers.values())))
    here = projected_seconds(clients[-1], cores(), costs)
    print(
        f"\nPROJECTED by the queueing model, not measured: a client {1000 * costs.compute:.1f} ms, a call "
        f"{1000 * costs.driver:.2f} ms of the driver, a fold {1000 * costs.fold:.2f} ms,\na round "
        f"{1000 * costs.fixed:.0f} ms; for {clients[-1]:,} clients on this machine the model says {here:.2f} s\n"
    )
    print(f"{'clients':>8}" + "".join(f"{f'{count} cores':>12}" for count in CLUSTERS) + "   seconds per round")
    projection = {}
    for count in (100, 1000, 10_000):
        seconds = [projected_seconds(count, actors, costs) for actors in CLUSTERS]
        projection[count] = dict(zip(CLUSTERS, seconds, strict=True))
        print(f"{count:>8,}" + "".join(f"{value:>12.2f}" for value in seconds))
    print("\nof these, the driver alone")
    for count in projection:
        alone = [calls(count, actors, costs.compute) * costs.driver for actors in CLUSTERS]
        print(f"{count:>8,}" + "".join(f"{value:>12.2f}" for value in alone))
    report(
        {"measured": measured, "raylets": drivers, "costs": asdict(costs), "projected": projection, "rows": data.what},
        options.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
