"""When a run repeats one of the paper's experiments (ACML 2023, PMLR 222), and may stand beside its figures.

What the paper reports, and what its authors set, each method brings with its rows (`methods/paper.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedppd_ray.config.identity import difference, flatten
from fedppd_ray.config.schema import Config
from fedppd_ray.methods import compare_rows

Figures = Mapping[str, float]  # metric → value

# Relative difference in rows per client up to which a run counts as the paper's ("about 2,100 rows" is its word).
_ROWS_TOLERANCE = 0.2
_CLIENTS = 10


@dataclass(frozen=True)
class Experiment:
    """What a client held, for how long it ran, and against what."""

    name: str
    data: str
    kinds: tuple[str, ...]  # partition kinds
    major: int | None  # major classes per client, where the partition has such
    extra: int | None  # rows of every class besides
    rows: int  # rows per client, about
    rounds: int
    ood: str | None


EXPERIMENTS = (
    Experiment("mnist", "mnist", ("major_classes",), 2, 10, 500, 100, None),
    Experiment("femnist", "femnist", ("major_classes", "writers"), None, None, 2000, 200, "kmnist"),
    Experiment("cifar10", "cifar10", ("major_classes",), 2, 10, 2100, 200, "svhn"),
    Experiment("cifar10_iid", "cifar10", ("iid",), None, None, 4000, 200, "svhn"),
    Experiment("cifar100", "cifar100", ("major_classes",), 20, 2, 2200, 200, "svhn"),
    Experiment("cifar100_iid", "cifar100", ("iid",), None, None, 4000, 200, "svhn"),
)


def experiment_of(config: Config, rows: float | None) -> Experiment | None:
    """The paper's experiment that this one repeats, if it does; `rows` is what a client really held, on average.

    It does where data set, partition (kind and major classes), number of clients and full participation are the
    paper's, rows per client within 20 % of its, and no client brings rows of its own. Rounds and settings are free: a
    table has to say how they differ.
    """
    part = config.data.partition
    if rows is None or config.federation.clients != _CLIENTS or config.federation.participation < 1:
        return None
    if any(section.data for section in config.clients.values()):
        return None
    for experiment in EXPERIMENTS:
        same_kind = part.kind in experiment.kinds and (
            part.kind != "major_classes" or experiment.major is None or part.major == experiment.major
        )
        near = abs(rows - experiment.rows) <= _ROWS_TOLERANCE * experiment.rows
        if config.data.name == experiment.data and same_kind and near:
            return experiment
    return None


def paper_rounds(experiment: Experiment | None) -> int | None:
    return experiment.rounds if experiment else None


def paper_figures(experiment: Experiment | None, label: str, ood: str | Sequence[str] | None) -> Figures:
    """metric → the paper's value for this row; empty where it has none.

    OOD figures only where ours are against the same out-of-distribution set.
    """
    row = compare_rows().get(label)
    if experiment is None or row is None:
        return {}
    found = row.paper.get(experiment.name, {})
    return {metric: value for metric, value in found.items() if metric != "ood_auroc" or ood == experiment.ood}


def other_settings(experiment: Experiment | None, label: str, config: Config) -> list[str]:
    """Where this row does not run as the authors ran it: lines `key: theirs -> ours`, without the rounds."""
    row = compare_rows().get(label)
    if experiment is None or row is None or experiment.name not in row.paper:
        return []
    theirs = dict(row.authors.get(experiment.name, {}))
    if experiment.extra is not None and config.data.partition.kind == "major_classes":
        theirs["data.partition.extra_per_class"] = experiment.extra
    ours = flatten(config)
    return difference(theirs, {key: ours[key] for key in theirs if key in ours})
