"""Do stacked virtual clients pay? One SGD step of several clients at once (`torch.func`: their networks stacked, `vmap`
over them) against one client after the other as `FedAvg` does it, in one process on one core, by CPU time.

    python benchmarks/stacked_clients.py [--clients 1 4 16 64] [--rows 40] [--repeats 7]

The gradients of both are compared first: it is the same work.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import CIFAR, cifar_rows, fedavg_config, median, parser_of, report
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedppd_ray.methods.fedavg import FedAvg

RATE = 0.0225


def ms(step: Callable[[], object], repeats: int) -> float:
    step()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        step()
        taken.append(1000 * (time.process_time() - began))
    return median(taken)


def measure(method: FedAvg, clients: int, rows: int, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    network = method.network
    start = torch.from_numpy(method.initial_models()["model"].copy())
    images = torch.randn(clients, rows, *CIFAR.shape, generator=generator)
    labels = torch.randint(len(CIFAR.classes), (clients, rows), generator=generator)
    batches = [batch.contiguous(memory_format=torch.channels_last) for batch in images]
    shapes = {name: parameter.shape for name, parameter in network.module.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network.module, weights, (x,)), y)

    def stack() -> dict[str, Tensor]:
        parts = start.split(sizes)
        return {
            name: part.view(shape).expand(clients, *shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    gradients = vmap(grad(loss))

    def together() -> Tensor:
        weights = stack()
        found = gradients(weights, images, labels)
        return torch.cat([(weights[name] - RATE * found[name]).flatten(1) for name in shapes], 1)

    def one_by_one() -> Tensor:
        learnt = []
        for x, y in zip(batches, labels, strict=True):
            network.load(start.numpy())
            gradient = network.backward(F.cross_entropy(network.module(x), y))
            learnt.append(start - RATE * gradient)
        return torch.stack(learnt)

    return {
        "differs_by": float((together() - one_by_one()).abs().max()),
        "together_ms": ms(together, repeats) / clients,
        "one_by_one_ms": ms(one_by_one, repeats) / clients,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    with cifar_rows(options.rows) as data:
        method = FedAvg(fedavg_config(data, 1, options.rows, 1))
    print(f"a step of {options.rows} rows, ms of CPU per client\n")
    print(f"{'clients':>8}{'stacked':>10}{'in turn':>10}{'stacked / in turn':>20}{'differs by':>12}")
    for clients in options.clients:
        row = result[clients] = measure(method, clients, options.rows, options.repeats)
        ratio = row["together_ms"] / row["one_by_one_ms"]
        print(
            f"{clients:>8}{row['together_ms']:>10.2f}{row['one_by_one_ms']:>10.2f}{ratio:>20.2f}"
            f"{row['differs_by']:>12.0e}",
            flush=True,
        )
    report({"clients": result}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
