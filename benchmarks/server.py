"""What does the server cost? Aggregation and distillation against the number of clients and the model's size.

    python benchmarks/server.py [--short] [--json FILE]

1. Averaging: seconds and peak memory of a round's folds (screen and addition), and the speed of the addition against
   memory itself: a triad a = b + s·c over as many bytes, in turns. 1.00 is the machine's bandwidth.
2. Server distillation (CIFAR-10's student network): seconds and peak memory against the number of clients.
3. Teacher and student distilled side by side, as the server does, against one after the other.
4. Pseudo-labels of the whole ensemble batch by batch, as the server makes them, against model by model, row by row.

Each measurement has a process of its own, whose growth over what it had at the start is its peak memory; clients'
models stand ready before it starts, as on the server they lie in the object store.
"""

import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import CIFAR, cores, median, parser_of, report, warn_of_company

from fedppd_ray.bayes.ensemble import pseudo_labels, server_distillation
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.federation.aggregate import StreamingAverage
from fedppd_ray.federation.screen import refusal
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.methods.fedppd import ROLES, FedPPD, FedPPDAggregation
from fedppd_ray.models.flat import FlatModel, Vector

DISTINCT = 8  # models that stand for all clients' where nobody keeps them: too many for any cache
BYTES = 20  # of an addition, a number: 4 of the model and 8 of the sum are read, 8 written


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}{arguments} died") from None
    finally:
        process.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(function(*arguments))


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# --- 1. averaging ----------------------------------------------------------------------------------------------


def averaging(size: int, clients: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    models = [generator.standard_normal(size, np.float32) for _ in range(min(clients, DISTINCT))]
    updates = [ClientUpdate(Receipt("client-00", 1, 40 + index), {"model": each}) for index, each in enumerate(models)]
    # As many bytes as an addition moves: three arrays of float64.
    a, b, c = (torch.ones(BYTES * size // 24, dtype=torch.float64) for _ in range(3))
    before = resident_megabytes()
    average = StreamingAverage(size)
    screen, add, triad = [], [], []
    for number in range(clients):
        update = updates[number % len(updates)]
        screen.append(seconds(lambda u=update: refusal("client-00", u, 1, {"model": size})))
        add.append(seconds(lambda u=update: average.add(u.models["model"], u.receipt.rows)))
        triad.append(seconds(lambda: torch.add(b, c, alpha=0.5, out=a)))
    finish = seconds(average.result)
    return {
        "seconds": sum(screen) + sum(add) + finish,
        "screen_s": sum(screen),
        "add_s": sum(add),
        "peak_mb": max(0.0, peak_megabytes() - before),
        "gigabytes_a_second": size * BYTES / median(add) / 1e9,
        "of_bandwidth": median(triad) / median(add),
    }


# --- 2. distillation -------------------------------------------------------------------------------------------


def distilling_config(pool: int) -> Config:
    return parse_config(
        {
            "data": {"name": "cifar10", "server_pool": pool},
            "server": {"aggregate": "distill", "distill": {"epochs": 1}},
            "evaluation": {"ood": None},
        }
    )


def random_pool(rows: int) -> Shard:
    images = np.random.default_rng(0).integers(0, 256, (rows, *CIFAR.shape), np.uint8)
    return ImageShard(images, None, CIFAR)


def near(model: Vector, count: int) -> list[Vector]:
    """Clients' models: the global one, each moved a little."""
    generator = np.random.default_rng(1)
    return [model + 0.01 * generator.standard_normal(model.size, np.float32) for _ in range(count)]


def distillation(clients: int, rows: int) -> dict[str, float]:
    config = distilling_config(rows)
    method, pool = FedPPD(config), random_pool(rows)
    start = method.initial_models()["student"]
    models = near(start, clients)
    before = resident_megabytes()
    taken = seconds(
        lambda: server_distillation(
            method.networks_by_role["student"],
            start,
            start,
            models,
            pool,
            method.settings.server.distill.plan("student"),
            drawn=torch.Generator(),
            stream=torch.Generator(),
        )
    )
    growth = max(0.0, peak_megabytes() - before)
    return {"seconds": taken, "peak_mb": growth, "of_models": growth / (clients * start.nbytes / 2**20)}


# --- 3. side by side -------------------------------------------------------------------------------------------


def side_by_side(clients: int, rows: int, turns: int) -> dict[str, float]:
    method, pool = FedPPD(distilling_config(rows)), random_pool(rows)
    state = GlobalState(0, method.initial_models())
    moved = {role: near(state.models[role], clients) for role in ROLES}

    def folded() -> FedPPDAggregation:
        aggregation = method.aggregation(state)
        for client in range(clients):
            models = {role: moved[role][client] for role in ROLES}
            aggregation.fold(ClientUpdate(Receipt(f"client-{client:02d}", 1, 40), models))
        return aggregation

    def one_by_one(aggregation: FedPPDAggregation) -> None:
        for role in ROLES:
            aggregation._distil(role, aggregation._averages[role].result(), pool)

    together, apart = [], []
    for _ in range(turns + 1):
        ready = folded()
        together.append(seconds(lambda each=ready: each.finish(pool)))
        apart.append(seconds(lambda each=ready: one_by_one(each)))
    pairs = list(zip(together, apart, strict=True))[1:]
    return {
        "together_s": median([a for a, _ in pairs]),
        "apart_s": median([b for _, b in pairs]),
        "ratio": median([a / b for a, b in pairs]),
    }


# --- 4. pseudo-labels ------------------------------------------------------------------------------------------


@torch.no_grad()
def row_by_row(model: FlatModel, members: list[Vector], pool: Shard) -> None:
    model.module.eval()
    total = torch.zeros(len(pool), len(CIFAR.classes))
    for member in members:
        model.load(member)
        for row in range(len(pool)):
            total[row] += torch.softmax(model.module(pool.inputs(torch.tensor([row]))), 1)[0]
    torch.div(total, len(members), out=total)


def labelling(members: int, rows: int, turns: int) -> dict[str, float]:
    method, pool = FedPPD(distilling_config(rows)), random_pool(rows)
    model = method.networks_by_role["student"]
    models = near(method.initial_models()["student"], members)
    batched, single = [], []
    for _ in range(turns + 1):
        batched.append(seconds(lambda: pseudo_labels(model, models, pool, 1.0)))
        single.append(seconds(lambda: row_by_row(model, models, pool)))
    pairs = list(zip(batched, single, strict=True))[1:]
    return {"batched_s": median([a for a, _ in pairs]), "ratio": median([b / a for a, b in pairs])}


def main() -> int:
    options = parser_of(__doc__).parse_args()
    warn_of_company()
    short = options.short
    result: dict[str, Any] = {"averaging": {}, "distillation": {}}
    print("averaging, one core\n")
    print(f"{'parameters':>12}{'clients':>9}{'seconds':>10}{'peak MB':>9}{'GB/s':>7}   addition / memory bandwidth")
    cases = [(60_000, 10), (60_000, 1000), (1_000_000, 100), (20_000_000, 10)]
    cases += [] if short else [(1_000_000, 1000), (20_000_000, 100), (20_000_000, 1000)]
    for size, clients in sorted(cases):
        row = result["averaging"][f"{size}x{clients}"] = in_own_process(averaging, size, clients)
        print(
            f"{size:>12,}{clients:>9,}{row['seconds']:>10.3f}{row['peak_mb']:>9.0f}{row['gigabytes_a_second']:>7.1f}"
            f"   {row['of_bandwidth']:.2f}",
            flush=True,
        )
    print("\ndistillation of the student, one epoch of 200 rows\n")
    print(f"{'clients':>8}{'seconds':>10}{'peak MB':>9}   peak / models")
    for clients in (10, 100) if short else (10, 100, 1000):
        row = result["distillation"][clients] = in_own_process(distillation, clients, 200)
        print(f"{clients:>8,}{row['seconds']:>10.2f}{row['peak_mb']:>9.0f}   {row['of_models']:.2f}", flush=True)
    turns, rows = (2, 500) if short else (5, 2000)
    both = result["side_by_side"] = in_own_process(side_by_side, 10, rows, turns)
    print(
        f"\nteacher and student, 10 clients, {rows:,} rows, {cores()} cores: side by side {both['together_s']:.2f} s, "
        f"one after the other {both['apart_s']:.2f} s, ratio {both['ratio']:.2f}"
    )
    labels = result["labelling"] = in_own_process(labelling, 20, rows // 5, turns)
    print(f"pseudo-labels of 20 models: row by row takes {labels['ratio']:.1f} times as long as in batches")
    report(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
