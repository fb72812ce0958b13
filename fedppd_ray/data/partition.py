"""[2] Who holds which training rows: deterministic in the seed, disjoint, and nothing lost.

Every row of the training set goes to exactly one place: a client, the unlabelled server pool, the held-out
calibration set, or `unused`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.data import DataConfig, PartitionConfig
from fedppd_ray.errors import ConfigError
from fedppd_ray.seeding import numpy_generator_for

Indices = NDArray[np.int64]
_DIRICHLET_TRIES = 100


@dataclass(frozen=True)
class Partition:
    """Row numbers into the training set, each array sorted."""

    clients: tuple[Indices, ...]
    server_pool: Indices  # or, where the server uses none, the reserved rows
    calibration: Indices
    unused: Indices


def partition(
    labels: NDArray[np.int64],
    classes: int,
    data: DataConfig,
    clients: int,
    seed: int,
    writers: NDArray[np.int64] | None = None,
) -> Partition:
    """Split the rows of a training set with these labels, and these writers where it knows them."""
    generator = numpy_generator_for(seed, "partition")
    order = generator.permutation(len(labels))
    held_out = data.withheld + data.calibration_rows(len(labels))
    if held_out + clients > len(labels):
        raise ConfigError(
            f"federation.clients: {clients} clients and {held_out} held-out rows do not fit into the {len(labels)} "
            f"rows of {data.name}; use fewer, or lower data.server_pool and data.calibration"
        )
    if data.partition.kind == "writers":
        pool, calibration, rest, shares = _by_writers(_known(writers, data.name), order, data, clients)
    elif data.partition.kind == "column":
        pool, calibration, rest = np.split(order, [data.withheld, held_out])
        owners = _known(writers, data.name)
        shares = [rest[owners[rest] == client] for client in range(clients)]
    else:
        pool, calibration, rest = np.split(order, [data.withheld, held_out])
        shares = _SPLITTERS[data.partition.kind](labels, rest, classes, data.partition, clients, generator)
    if any(len(share) == 0 for share in shares):
        raise ConfigError(f"data.partition: a client would hold no row; use fewer than {clients} clients")
    unused = np.setdiff1d(rest, np.concatenate([np.empty(0, np.int64), *shares]))
    return Partition(tuple(np.sort(share) for share in shares), np.sort(pool), np.sort(calibration), unused)


def _known(writers: NDArray[np.int64] | None, name: str) -> NDArray[np.int64]:
    if writers is None:
        raise ConfigError(f"data.partition.kind: {name} does not say who wrote a row; choose another than writers")
    return writers


def _by_writers(
    writers: NDArray[np.int64], order: Indices, data: DataConfig, clients: int
) -> tuple[Indices, Indices, Indices, list[Indices]]:
    """Whole writers for the server's pool, until it has its rows, and whole writers for each client.

    Calibration rows are drawn at random from what the pool leaves. The other rows of a writer stay together and go to
    the client with the fewest rows, unless that takes it above `rows_per_client`. Random writers are dealt, as many as
    the clients want rows of, the longest first (which makes the clients about equal); then others where they fit.
    """
    _, first, writers = np.unique(writers, return_index=True, return_inverse=True)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    shuffled = np.argsort(place[first])  # by one row each: prolific writers come no sooner than others
    sizes = np.bincount(writers)[shuffled]
    taken = int(np.searchsorted(np.cumsum(sizes), data.withheld)) + 1 if data.withheld else 0
    in_pool = np.isin(writers[order], shuffled[:taken])
    pool, left = order[in_pool], order[~in_pool]
    calibration, rest = np.split(left, [data.calibration_rows(len(order))])
    by_writer = rest[np.argsort(writers[rest], kind="stable")]
    ends = np.cumsum(np.bincount(writers[rest], minlength=len(shuffled)))
    by_number = np.split(by_writer, ends)
    decks = [by_number[writer] for writer in shuffled[taken:] if len(by_number[writer])]
    limit = data.partition.rows_per_client or len(order)
    wanted = int(np.searchsorted(np.cumsum([len(deck) for deck in decks]), clients * limit)) + 1
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    held = np.zeros(clients, np.int64)
    for deck in [*sorted(decks[:wanted], key=len, reverse=True), *decks[wanted:]]:
        client = int(held.argmin())
        if held[client] + len(deck) <= limit:
            shares[client].append(deck)
            held[client] += len(deck)
    if not held.all():
        raise ConfigError(
            f"data.partition: by writers, {int((held == 0).sum())} of {clients} clients would hold no row; use fewer "
            f"clients, lower data.server_pool or raise data.partition.rows_per_client"
        )
    return pool, calibration, rest, [np.concatenate(share) for share in shares]


def _iid(
    _labels: NDArray[np.int64],
    rows: Indices,
    _classes: int,
    part: PartitionConfig,
    clients: int,
    _generator: np.random.Generator,
) -> list[Indices]:
    """Random rows in equal numbers (`rows` come shuffled)."""
    if part.rows_per_client is None:
        return list(np.array_split(rows, clients))
    _require(part.rows_per_client * clients, len(rows))
    return [rows[i * part.rows_per_client : (i + 1) * part.rows_per_client] for i in range(clients)]


def _major_classes(
    labels: NDArray[np.int64],
    rows: Indices,
    classes: int,
    part: PartitionConfig,
    clients: int,
    generator: np.random.Generator,
) -> list[Indices]:
    """At most `major` major classes per client, plus `extra_per_class` rows of every class.

    Major classes are dealt in turn from a shuffled deck, so that every class is major about equally often.
    """
    decks = [list(rows[labels[rows] == label]) for label in range(classes)]
    extras = _deal_extras(decks, part, clients)
    need = np.zeros(clients, np.int64)
    if part.rows_per_client is not None:
        need[:] = part.rows_per_client - np.array([len(extra) for extra in extras])
        if need.min() < 0:
            raise ConfigError(
                f"data.partition.rows_per_client: {part.rows_per_client} is less than the "
                f"{classes * part.extra_per_class} rows of extra_per_class; raise one or lower the other"
            )
    majors = _deal_classes(classes, part.major, clients, generator)
    holders = [[c for c in range(clients) if label in majors[c]] for label in range(classes)]
    shares = [list(extra) for extra in extras]
    for label, deck in enumerate(decks):
        for piece, client in zip(np.array_split(deck, max(1, len(holders[label]))), holders[label], strict=False):
            # A client takes the same number from each of its major classes, as far as they reach.
            index = majors[client].index(label)
            wanted = len(piece) if part.rows_per_client is None else _even_part(need[client], part.major, index)
            shares[client].extend(piece[:wanted])
    return [np.array(share, np.int64) for share in shares]


def _even_part(total: int, parts: int, index: int) -> int:
    return int(total // parts + (1 if index < total % parts else 0))


def _deal_extras(decks: list[list[np.int64]], part: PartitionConfig, clients: int) -> list[list[np.int64]]:
    extras: list[list[np.int64]] = [[] for _ in range(clients)]
    for label, deck in enumerate(decks):
        if len(deck) < part.extra_per_class * clients:
            raise ConfigError(
                f"data.partition.extra_per_class: {clients} clients want {part.extra_per_class} rows each of "
                f"class {label}, which has {len(deck)}; lower it to at most {len(deck) // clients}"
            )
        for extra in extras:
            extra.extend(deck[: part.extra_per_class])
            del deck[: part.extra_per_class]
    return extras


def _deal_classes(classes: int, major: int, clients: int, generator: np.random.Generator) -> list[list[int]]:
    """`major` different classes for each client, every class as often as any other (± 1)."""
    used = np.zeros(classes, np.int64)
    majors: list[list[int]] = []
    for _ in range(clients):
        shuffled = generator.permutation(classes)
        chosen = shuffled[np.argsort(used[shuffled], kind="stable")][:major]
        used[chosen] += 1
        majors.append([int(label) for label in chosen])
    return majors


def _dirichlet(
    labels: NDArray[np.int64],
    rows: Indices,
    classes: int,
    part: PartitionConfig,
    clients: int,
    generator: np.random.Generator,
) -> list[Indices]:
    """Each class is split by proportions from Dirichlet(alpha); drawn again until every client has a row."""
    for _ in range(_DIRICHLET_TRIES):
        shares: list[list[np.int64]] = [[] for _ in range(clients)]
        for label in range(classes):
            deck = rows[labels[rows] == label]
            cuts = np.cumsum(generator.dirichlet(np.full(clients, part.alpha)))[:-1]
            for share, piece in zip(shares, np.split(deck, (cuts * len(deck)).astype(int)), strict=True):
                share.extend(piece)
        if all(shares):
            limit = part.rows_per_client
            return [generator.permutation(np.array(share, np.int64))[:limit] for share in shares]
    raise ConfigError(f"data.partition.alpha: {part.alpha} leaves some of {clients} clients without a row; raise it")


def _require(wanted: int, available: int) -> None:
    if wanted > available:
        raise ConfigError(
            f"data.partition.rows_per_client: the clients want {wanted} rows, {available} are left; lower it"
        )


def _folders(
    _labels: NDArray[np.int64],
    _rows: Indices,
    _classes: int,
    _part: PartitionConfig,
    _clients: int,
    _generator: np.random.Generator,
) -> list[Indices]:
    """Clients have rows of their own; of these they get none."""
    return []


_SPLITTERS = {"folders": _folders, "iid": _iid, "major_classes": _major_classes, "dirichlet": _dirichlet}
