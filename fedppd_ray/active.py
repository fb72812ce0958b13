"""Federated active learning: train, let every client rank its own pool, label, train again, until pools are empty.

Every training is an ordinary run, `<out>/<method>/<acquisition>/step-<s>`, with its figures beside it; the first is
the same whatever is acquired later, and is made once. A client's labelled rows follow from the final global models
of the earlier steps (`core/labelling.py`), which it is given at its start. So the same call again skips what is
finished and continues the rest where it stopped.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedppd_ray.checkpoint.remote import is_url
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.comparison import Run, finished, keep_figures, locked, parse_methods, require_own_folder
from fedppd_ray.config import ActiveConfig, Config
from fedppd_ray.config_file import load_config
from fedppd_ray.core.types import GlobalState
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.evaluation.active_report import Point, Study, write_study

log = logging.getLogger("fedppd")
ACQUISITIONS = ("entropy", "random")

# Starts or continues the run of this folder, given the models that ranked the pools, and ends with its last round.
Train = Callable[[Config, Path, Sequence[GlobalState]], None]


@dataclass(frozen=True)
class Plan:
    out: Path
    active: ActiveConfig
    title: str
    configs: Mapping[str, Mapping[str, Config]]  # method → acquisition → config
    steps: int

    def run(self, method: str, acquisition: str, step: int) -> Run:
        if step == 0:
            acquisition, folder = ACQUISITIONS[0], self.out / method / "step-0"
        else:
            folder = self.out / method / acquisition / f"step-{step}"
        config = self.configs[method][acquisition]
        return Run(method, config.seed, config, folder)


def plan(config: Path, methods: str, out: str, *, steps: int | None = None, settings: Sequence[str] = ()) -> Plan:
    """Read and check everything before anything runs. `steps` is the number of trainings; None: until pools end."""
    if is_url(out):
        raise ConfigError(f"--out {out}: a study of active learning needs a local folder")
    base = load_config(config, settings)
    if base.active is None:
        raise ConfigError(f"active: {config} has no such section; configs/active_cifar10.yaml shows one")
    configs: dict[str, dict[str, Config]] = {}
    for label, (path, changes) in parse_methods(methods, config).items():
        for acquisition in ACQUISITIONS:
            named = f"name={json.dumps(f'{base.name}-{label}-{acquisition}')}"
            own = load_config(path, [*settings, *changes, f"active.acquisition={acquisition}", named])
            if own.active is None or not _same_amounts(own.active, base.active):
                raise ConfigError(f"{label}: {path} has another active section than {config}; give both the same")
            configs.setdefault(label, {})[acquisition] = own
    title = f"{base.name}: active learning on {base.data.name}, {base.federation.clients} clients"
    return Plan(Path(out), base.active, title, configs, min(steps or base.active.trainings, base.active.trainings))


def _same_amounts(one: ActiveConfig, other: ActiveConfig) -> bool:
    return (one.labelled, one.pool, one.budget) == (other.labelled, other.pool, other.budget)


def study(planned: Plan, train: Train) -> Study:
    """A step of every method and acquisition before the next step of any, so that the plot grows evenly."""
    points: list[Point] = []
    with locked(planned.out):
        for step in range(planned.steps):
            for method in planned.configs:
                for acquisition in ACQUISITIONS:
                    log.info("step %d of %d: %s, %s", step + 1, planned.steps, method, acquisition)
                    points.append(_point(planned, method, acquisition, step, train))
                    write_study(planned.out, Study(planned.title, tuple(points), planned.steps))
    return Study(planned.title, tuple(points), planned.steps)


def _point(planned: Plan, method: str, acquisition: str, step: int, train: Train) -> Point:
    run = planned.run(method, acquisition, step)
    require_own_folder(run)
    _require_same_rounds(run)
    if finished(run) is None:
        earlier = [planned.run(method, acquisition, before) for before in range(step)]
        train(run.config, run.folder, [RunStore(before.folder).latest() for before in earlier])
        keep_figures(run)
    outcome = finished(run)
    if outcome is None:
        raise CheckpointError(f"{run.folder}: its figures cannot be read back; remove the folder and start again")
    active = planned.active
    labels = active.labelled + min(step * active.budget, active.pool)
    return Point(method, acquisition, step, labels, dict(outcome.figures))


def _require_same_rounds(run: Run) -> None:
    """More rounds may continue a single run, but here they would change what later trainings have labelled."""
    store = RunStore(run.folder)
    if not store.exists():
        return
    before, wanted = store.config().federation.rounds, run.config.federation.rounds
    if before != wanted:
        raise CheckpointError(
            f"federation.rounds: {run.folder} was started for {before} rounds, not {wanted}; the rows labelled "
            f"next follow from them: use {before}, or a new --out"
        )
