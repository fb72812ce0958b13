"""How much of the cluster each client gets, and which device that means. Pure functions, no Ray.

A fraction never straddles two devices or two nodes, so shares are sized per node and per GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedppd_ray.config import ResourcesConfig
from fedppd_ray.errors import ResourceError

_GRAIN = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class NodeResources:
    id: str
    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Share:
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """Torch threads: one unless the actor owns more whole cores."""
        return max(1, int(self.cpus))


@dataclass(frozen=True)
class Allocation:
    clients: Mapping[str, Share]
    server: Share


@dataclass(frozen=True)
class DeviceChoice:
    device: str
    memory_fraction: float | None  # of the GPU's memory, for torch.cuda.set_per_process_memory_fraction
    warning: str | None = None


def largest_share(capacities: Sequence[float], holders: int) -> float:
    """The largest equal share, at most 1, such that `holders` of them fit without straddling a capacity.

    The optimum fills some capacity exactly with a whole number of shares, so only those quotients are tried.
    """
    candidates = {
        min(1.0, math.floor(capacity / parts * _GRAIN) / _GRAIN)
        for capacity in capacities
        for parts in range(1, holders + 1)
    }
    for share in sorted(candidates, reverse=True):
        if share > 0 and sum(_fits(capacity, share) for capacity in capacities) >= holders:
            return share
    return 0.0


def _fits(capacity: float, share: float) -> int:
    return round(capacity * _GRAIN) // round(share * _GRAIN)


def allocate(clients: Sequence[str], nodes: Sequence[NodeResources], config: ResourcesConfig) -> Allocation:
    """Shares of every client and of the server. `auto` lets the clients and the server share what there is."""
    holders = len(clients) + 1
    auto_cpus = largest_share([node.cpus for node in nodes if node.cpus > 0], holders)
    # A GPU is a capacity of one, wherever it is; a fraction of one never spans two.
    gpus = [1.0 for node in nodes for _ in range(int(node.gpus))]
    auto_gpus = largest_share(gpus, holders) if gpus else 0.0

    def share(cpus: float | str | None, gpus: float | str | None) -> Share:
        return Share(
            auto_cpus if cpus in ("auto", None) else float(cpus or 0),
            auto_gpus if gpus in ("auto", None) else float(gpus or 0),
        )

    shares: dict[str, Share] = {}
    for client in clients:
        own = config.clients.get(client)
        cpus = config.client_cpus if own is None or own.cpus is None else own.cpus
        gpus_wanted = config.client_gpus if own is None or own.gpus is None else own.gpus
        shares[client] = share(cpus, gpus_wanted)
    allocation = Allocation(shares, share(config.server_cpus, config.server_gpus))
    _check(allocation, nodes)
    return allocation


def _check(allocation: Allocation, nodes: Sequence[NodeResources]) -> None:
    """Refuse at once what can never be scheduled: Ray itself would wait for ever."""
    for name, share in [("the server", allocation.server), *allocation.clients.items()]:
        for kind, wanted in (("GPU", share.gpus), ("CPU", share.cpus)):
            if kind == "GPU" and wanted > 1 and wanted != int(wanted):
                raise ResourceError(f"{name} asks for {wanted:g} GPUs; above 1 only whole numbers can be given")
            if not any(wanted <= (node.gpus if kind == "GPU" else node.cpus) for node in nodes):
                raise ResourceError(f"{name} asks for {wanted:g} {kind}; {describe(nodes)}; lower resources.*")
    for kind, total, have in (
        ("CPU", _total(allocation, "cpus"), sum(node.cpus for node in nodes)),
        ("GPU", _total(allocation, "gpus"), sum(node.gpus for node in nodes)),
    ):
        if total > have + 1e-6:
            raise ResourceError(
                f"{len(allocation.clients)} clients and the server ask for {total:g} {kind} together; "
                f"{describe(nodes)}; lower resources.*, or leave it at auto"
            )


def _total(allocation: Allocation, kind: str) -> float:
    return sum(float(getattr(share, kind)) for share in [allocation.server, *allocation.clients.values()])


def describe(nodes: Sequence[NodeResources]) -> str:
    parts = ", ".join(f"{node.name}: {node.cpus:g} CPU, {node.gpus:g} GPU" for node in nodes)
    return f"the cluster has {parts or 'no node'}"


def choose_device(assigned_gpus: Sequence[object], gpu_share: float, cuda_available: bool) -> DeviceChoice:
    """The device for what Ray assigned, and the memory cap that goes with the fraction.

    Ray makes only the assigned GPU visible, so it is always cuda:0; a fraction of a GPU does not cap its
    memory by itself. Without an assignment CUDA may still be visible: that GPU belongs to others.
    """
    if not assigned_gpus:
        return DeviceChoice("cpu", None)
    if not cuda_available:
        return DeviceChoice("cpu", None, "Ray assigned a GPU, but torch sees none; training on the CPU")
    return DeviceChoice("cuda:0", min(1.0, gpu_share))
