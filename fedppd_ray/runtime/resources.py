"""How much of the cluster each client gets, and which device that means. Pure functions, no Ray.

A fraction never straddles two devices or two nodes, so shares are sized per node and per GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedppd_ray.config.schema import ClientOverrides, ResourcesConfig
from fedppd_ray.errors import ResourceError

_SERVER = "the server"
_GRAIN = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class NodeResources:
    id: str
    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


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
    """The largest equal share, at most 1, such that `holders` of them fit without straddling a capacity; 0 if none.

    The optimum fills some capacity exactly with a whole number of shares, so only those quotients are tried.
    """
    candidates = {
        min(1.0, round(capacity * _GRAIN) // parts / _GRAIN)  # in whole grains: 28.5 / 50 is a hair below 0.57
        for capacity in capacities
        for parts in range(1, holders + 1)
    }
    for share in sorted(candidates, reverse=True):
        if share > 0 and sum(_fits(capacity, share) for capacity in capacities) >= holders:
            return share
    return 0.0


def _fits(capacity: float, share: float) -> int:
    return round(capacity * _GRAIN) // round(share * _GRAIN)


def allocate(
    names: Sequence[str],
    nodes: Sequence[NodeResources],
    config: ResourcesConfig,
    wishes: Mapping[str, ClientOverrides] | None = None,
) -> Allocation:
    """Shares of every client actor and of the server.

    Numbers, of the whole section or of a client's own wishes, are given first; `auto` shares what is left.
    """
    asked = {name: (wishes or {}).get(name, ClientOverrides()) for name in names}
    _check_labels(asked, nodes)
    cpus = _deal(
        {name: config.client_cpus if wish.cpus is None else wish.cpus for name, wish in asked.items()},
        config.server_cpus,
        [(node, node.cpus) for node in nodes if node.cpus > 0],
        asked,
        spare=True,
    )
    gpus = _deal(
        {name: config.client_gpus if wish.gpus is None else wish.gpus for name, wish in asked.items()},
        config.server_gpus,
        # A GPU is a capacity of one, wherever it is; a fraction of one never spans two.
        [(node, 1.0) for node in nodes for _ in range(int(node.gpus))],
        asked,
        spare=False,
    )
    shares = {name: Share(cpus[name], gpus[name]) for name in names}
    allocation = Allocation(shares, Share(cpus[_SERVER], gpus[_SERVER]))
    _check(allocation, nodes)
    return allocation


def _deal(
    wanted: Mapping[str, float | str],
    server: float | str,
    places: Sequence[tuple[NodeResources, float]],
    asked: Mapping[str, ClientOverrides],
    spare: bool,
) -> dict[str, float]:
    """One kind of resource: fixed numbers as they are, the same share for all that say `auto`.

    With `spare`, the roomiest of several places is left out of the reckoning: when a node dies, its clients must
    find room on the others. CPU shares are bookkeeping, so that costs nothing; a GPU's share caps its memory.
    """
    everyone = {_SERVER: server, **wanted}
    left = [capacity for _, capacity in places]
    fixed = {name: float(value) for name, value in everyone.items() if value != "auto"}
    for number in sorted(fixed.values(), reverse=True):
        if left:
            roomiest = max(range(len(left)), key=left.__getitem__)
            left[roomiest] = max(0.0, left[roomiest] - number)
    # Where each may live; without a place of this kind it gets nothing of it and is in nobody's way.
    home = {
        name: frozenset(
            index
            for index, (node, _) in enumerate(places)
            if name == _SERVER or matches(asked[name].label_selector, node.labels)
        )
        for name in everyone
        if name not in fixed
    }
    anywhere = frozenset(range(len(places)))
    common = sorted(left)[:-1] if spare and len(left) > 1 else left
    auto = largest_share(common, sum(1 for where in home.values() if where))
    for where in set(home.values()) - {anywhere, frozenset()}:
        # Those who are bound to these places must fit even if everyone comes who may.
        guests = sum(1 for other in home.values() if other & where)
        auto = min(auto, largest_share([left[index] for index in where], guests))
    return {name: fixed[name] if name in fixed else (auto if home[name] else 0.0) for name in everyone}


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Ray's label selectors: `value`, `!value`, `in(a, b)`, `!in(a, b)`."""

    def fits(key: str, wanted: str) -> bool:
        negated, text = wanted.startswith("!"), wanted.removeprefix("!")
        values = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
        return (labels.get(key) in [value.strip() for value in values]) != negated

    return all(fits(key, wanted) for key, wanted in selector.items())


def _check_labels(asked: Mapping[str, ClientOverrides], nodes: Sequence[NodeResources]) -> None:
    for name, wish in asked.items():
        if wish.label_selector and not any(matches(wish.label_selector, node.labels) for node in nodes):
            raise ResourceError(
                f"{name} wants a node with labels {dict(wish.label_selector)}; {describe(nodes)}; start such a node "
                f"(ray start --labels …) or mend clients.{name}.label_selector"
            )


def _check(allocation: Allocation, nodes: Sequence[NodeResources]) -> None:
    """Refuse at once what can never be scheduled: Ray itself would wait for ever."""
    for name, share in [(_SERVER, allocation.server), *allocation.clients.items()]:
        for kind, wanted in (("GPU", share.gpus), ("CPU", share.cpus)):
            if kind == "GPU" and wanted > 1 and wanted != int(wanted):
                raise ResourceError(f"{name} asks for {wanted:g} GPUs; above 1 only whole numbers can be given")
            if not any(wanted <= (node.gpus if kind == "GPU" else node.cpus) for node in nodes):
                raise ResourceError(f"{name} asks for {wanted:g} {kind}; {describe(nodes)}; lower resources.*")
    _check_fit("CPU", [share.cpus for share in allocation.clients.values()], [node.cpus for node in nodes], nodes)
    gpus = [1.0 for node in nodes for _ in range(int(node.gpus))]
    _check_fit("GPU", [share.gpus for share in allocation.clients.values()], gpus, nodes)
    for kind, total, have in (
        ("CPU", _total(allocation, "cpus"), sum(node.cpus for node in nodes)),
        ("GPU", _total(allocation, "gpus"), sum(node.gpus for node in nodes)),
    ):
        if total > have + 1e-6:
            raise ResourceError(
                f"{len(allocation.clients)} clients and the server ask for {total:g} {kind} together; "
                f"{describe(nodes)}; lower resources.*, or leave it at auto"
            )


def _check_fit(kind: str, shares: Sequence[float], capacities: Sequence[float], nodes: Sequence[NodeResources]) -> None:
    """Equal shares do not straddle: 0.6 of a GPU fits twice on two, not three times."""
    if not shares:
        return  # every client is a site
    size = shares[0]
    if not 0 < size <= 1 or any(share != size for share in shares):
        return
    room = sum(_fits(capacity, size) for capacity in capacities)
    if room < len(shares):
        raise ResourceError(
            f"{len(shares)} clients ask for {size:g} {kind} each, but only {room} such shares fit; {describe(nodes)}; "
            "lower resources.*, or leave it at auto"
        )


def _total(allocation: Allocation, kind: str) -> float:
    return sum(float(getattr(share, kind)) for share in [allocation.server, *allocation.clients.values()])


def describe(nodes: Sequence[NodeResources]) -> str:
    parts = ", ".join(
        f"{node.name}: {node.cpus:g} CPU, {node.gpus:g} GPU" + (f", labels {own}" if (own := _own_labels(node)) else "")
        for node in nodes
    )
    return f"the cluster has {parts or 'no node'}"


def _own_labels(node: NodeResources) -> dict[str, str]:
    """The labels that an operator gave; Ray's own begin with ray.io/."""
    return {key: value for key, value in node.labels.items() if not key.startswith("ray.io/")}


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
