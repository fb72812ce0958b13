"""Federated active learning: train, let every client rank its own pool, label, train again, until pools are empty.

Every training is an ordinary run, `<out>/<method>/<acquisition>/step-<s>`, with its figures beside it. The first, and
the last of an emptied pool, are the same however rows are acquired, and are made once. A client's labelled rows follow
from the final global models of the earlier steps (`core/labelling.py`), which it is given at its start. So the same
call again skips what is finished and continues the rest where it stopped.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedppd_ray.config.file import Overrides, load_for_method
from fedppd_ray.config.schema import ActiveConfig, Config
from fedppd_ray.errors import CheckpointError, ConfigError, FedPPDError, ResourceError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.remote import is_url
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies.base import (
    StudyRun,
    finished,
    keep_figures,
    locked,
    parse_methods,
    require_own_folder,
    require_same_data,
    shared_settings,
)

log = logging.getLogger("fedppd")
ACQUISITIONS = ("entropy", "random")

Publish = Callable[["Study"], None]  # writes what is known so far
# Starts or continues the run of this folder, given the models that ranked the pools, and ends with its last round.
Train = Callable[[Config, Path, Sequence[GlobalState]], None]


@dataclass(frozen=True)
class Point:
    """The figures of one training."""

    method: str
    acquisition: str
    step: int
    labels: int  # labelled rows of a client
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    name: str
    settings: Mapping[str, Any]  # the configuration that all methods start from
    points: tuple[Point, ...]
    steps: int
    failed: Mapping[tuple[str, str], str] = field(default_factory=dict)  # method and acquisition → why

    @property
    def title(self) -> str:
        data, clients = self.settings["data"]["name"], self.settings["federation"]["clients"]
        return f"{self.name}: active learning on {data}, {clients} clients"

    @property
    def series(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((point.method, point.acquisition) for point in self.points))

    def of(self, method: str, acquisition: str) -> list[Point]:
        return [point for point in self.points if (point.method, point.acquisition) == (method, acquisition)]


@dataclass(frozen=True)
class Plan:
    out: Path
    base: Config
    active: ActiveConfig
    configs: Mapping[str, Mapping[str, Config]]  # method → acquisition → config
    steps: int

    @property
    def series(self) -> list[tuple[str, str]]:
        return [(method, acquisition) for method in self.configs for acquisition in ACQUISITIONS]

    def run(self, method: str, acquisition: str, step: int) -> StudyRun:
        if step in (0, self.active.trainings - 1):  # everybody's rows are the same
            acquisition = ACQUISITIONS[0]
        folder = self.out / method / (f"{acquisition}/step-{step}" if step else "step-0")
        config = self.configs[method][acquisition]
        return StudyRun(method, config.seed, config, folder)


def plan(config: Path | str, methods: str, out: str, *, steps: int | None = None, settings: Overrides = ()) -> Plan:
    """Read and check everything before anything runs. `steps` is the number of trainings; None: until pools end."""
    if is_url(out):
        raise ConfigError(f"--out {out}: a study of active learning needs a local folder")
    base = load_for_method(config, settings, ())
    if base.active is None:
        raise ConfigError(f"active: {config} has no such section; configs/active_cifar10.yaml shows one")
    configs: dict[str, dict[str, Config]] = {}
    for label, (path, changes) in parse_methods(methods, config).items():
        for acquisition in ACQUISITIONS:
            named = f"name={json.dumps(f'{base.name}-{label}-{acquisition}')}"
            chosen = [*changes, f"active.acquisition={acquisition}", f"seed={base.seed}", named]
            own = load_for_method(path, settings, chosen)
            if own.active is None or not _same_amounts(own.active, base.active):
                raise ConfigError(f"{label}: {path} has another active section than {config}; give both the same")
            require_same_data(label, base, own)
            # The same questions to everybody, whatever another file says.
            own = own.model_copy(update={"evaluation": base.evaluation})
            configs.setdefault(label, {})[acquisition] = own
    return Plan(Path(out), base, base.active, configs, min(steps or base.active.trainings, base.active.trainings))


def _same_amounts(one: ActiveConfig, other: ActiveConfig) -> bool:
    return (one.labelled, one.pool, one.budget) == (other.labelled, other.pool, other.budget)


def study(planned: Plan, train: Train, publish: Publish) -> Study:
    """A step of every series before the next step of any, so that the plot grows evenly.

    A series whose training fails ends there and is reported; the others go on.
    """
    for method, acquisition in planned.series:
        for step in range(planned.steps):
            run = planned.run(method, acquisition, step)
            require_own_folder(run)
            _require_same_rounds(run)
    failed: dict[tuple[str, str], str] = {}
    with locked(planned.out):
        publish(_study(planned, failed))
        for step in range(planned.steps):
            for method, acquisition in planned.series:
                if (method, acquisition) in failed:
                    continue
                log.info("step %d of %d: %s, %s", step + 1, planned.steps, method, acquisition)
                try:
                    _train_if_needed(planned, method, acquisition, step, train)
                except ResourceError:
                    raise  # the next training would ask the same of the same cluster
                except FedPPDError as error:
                    failed[method, acquisition] = " ".join(str(error).split())
                    log.error("%s, %s failed: %s", method, acquisition, failed[method, acquisition])
                publish(_study(planned, failed))
    return _study(planned, failed)


def _study(planned: Plan, failed: Mapping[tuple[str, str], str]) -> Study:
    """All that is finished by now, whenever that was."""
    active = planned.active
    points = []
    for step in range(planned.steps):
        labels = active.labelled + min(step * active.budget, active.pool)
        for method, acquisition in planned.series:
            outcome = finished(planned.run(method, acquisition, step))
            if outcome is not None:
                points.append(Point(method, acquisition, step, labels, dict(outcome.figures)))
    settings = {**shared_settings(planned.base), "seed": planned.base.seed}
    return Study(planned.base.name, settings, tuple(points), planned.steps, dict(failed))


def _train_if_needed(planned: Plan, method: str, acquisition: str, step: int, train: Train) -> None:
    run = planned.run(method, acquisition, step)
    if finished(run) is not None:
        return
    earlier = [planned.run(method, acquisition, before) for before in range(step)]
    train(run.config, run.folder, [_last_models(before) for before in earlier])
    keep_figures(run)
    if finished(run) is None:
        raise CheckpointError(f"{run.folder}: its figures cannot be read back; remove the folder and start again")


def _last_models(run: StudyRun) -> GlobalState:
    try:
        return RunStore(run.folder).latest()
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}, and what is labelled next follows from its models; remove that folder to train it again, or "
            f"choose another --out"
        ) from None


def _require_same_rounds(run: StudyRun) -> None:
    """More rounds may continue a single run, but here they would change what later trainings have labelled."""
    store = RunStore(run.folder)
    if not store.exists() or not store.has_rounds():
        return
    before, wanted = store.config().federation.rounds, run.config.federation.rounds
    if before != wanted:
        raise CheckpointError(
            f"federation.rounds: {run.folder} was started for {before} rounds, not {wanted}; the rows labelled "
            f"next follow from them: use {before}, or a new --out"
        )
