"""Several methods on the same clients' rows, side by side.

Every method and seed is an ordinary run, `<out>/<method>/seed-<seed>`, with its figures beside it in `figures.json`.
That is all the state there is: the same call again skips what is finished and continues the rest where it stopped.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedppd_ray.config.file import Overrides, load_for_method, override_lines
from fedppd_ray.config.identity import binding, difference, flatten
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError, ConfigError, FedPPDError, ResourceError
from fedppd_ray.methods import method_class
from fedppd_ray.runs.layout import FIGURES
from fedppd_ray.runs.remote import is_url
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies.base import (
    StudyRun,
    finished,
    keep_figures,
    locked,
    parse_methods,
    require_own_folder,
    require_read,
    require_same_data,
    shared_settings,
)
from fedppd_ray.studies.compared import Comparison, Outcome, Status
from fedppd_ray.studies.paper import experiment_of, other_settings, paper_figures, paper_rounds

log = logging.getLogger("fedppd")

EARLY = "+early"  # after the label of a method: the same run, stopped early
Publish = Callable[[Comparison], None]  # writes what is known so far
Train = Callable[[Config, Path], None]  # starts or continues the run of this folder, and ends with its last round


@dataclass(frozen=True)
class Plan:
    out: Path
    base: Config
    runs: tuple[StudyRun, ...]  # seeds outside, methods inside: the first whole table is there soonest

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))


# ---- the plan


def plan(
    config: Path | str,
    methods: str,
    out: str,
    *,
    seeds: str | None = None,
    rounds: int | None = None,
    settings: Overrides = (),
    early_stop: bool = False,
) -> Plan:
    """Read and check everything before anything runs. `methods` and `seeds` are lists with commas.

    `early_stop` adds a row to each method: the same run, judged at the round of its lowest NLL on calibration rows.
    """
    if is_url(out):
        raise ConfigError(f"--out {out}: a comparison needs a local folder")
    chosen = [*override_lines(settings), *([f"federation.rounds={rounds}"] if rounds else [])]
    chosen += ["evaluation.export=best"] if early_stop else []
    base = load_for_method(config, chosen, ())
    sources = parse_methods(methods, config)
    runs = []
    for seed in parse_seeds(seeds, base.seed):
        for label, (path, changes) in sources.items():
            name = json.dumps(f"{base.name}-{label}-{seed}")
            try:
                resolved = load_for_method(path, chosen, [*changes, f"seed={seed}", f"name={name}"])
            except ConfigError as error:
                raise ConfigError(f"{label}: {error}") from None
            require_read(label, changes, resolved)
            require_same_data(label, base, resolved)
            # The same questions to everybody, whatever another file says.
            resolved = resolved.model_copy(update={"evaluation": base.evaluation})
            run = StudyRun(label, seed, resolved, Path(out) / label / f"seed-{seed}")
            runs.append(run)
            # Whatever predicts by more than the network has that only after the last round.
            if early_stop and method_class(resolved).one_network:
                runs.append(replace(run, label=f"{label}{EARLY}", best=True))
    _require_readers(override_lines(settings), runs)
    return Plan(Path(out), base, tuple(runs))


def _require_readers(settings: Sequence[str], runs: Sequence[StudyRun]) -> None:
    """What is set for a comparison must be read by one of its methods at least."""
    for setting in settings:
        key = setting.partition("=")[0]
        known = {name for run in runs for name in flatten(run.config)}
        if not any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in known):
            raise ConfigError(f"--set {key}: none of these methods reads it; remove it, or add one that does")


def parse_seeds(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ConfigError(f"--seeds {text}: write different whole numbers with commas, for example 0,1,2")
    return [int(part) for part in parts]


# ---- the comparison


def compare(planned: Plan, train: Train, publish: Publish) -> Comparison:
    """Run what is not finished yet, and publish after each. A run that fails is reported as such; the rest goes on."""
    for run in planned.runs:
        require_own_folder(run)
    with locked(planned.out):
        outcomes = [finished(run) or _outcome(run, "waiting") for run in planned.runs]
        publish(_comparison(planned, outcomes))
        for index, run in enumerate(planned.runs):
            where = (
                f"method {planned.labels.index(run.label) + 1} of {len(planned.labels)}, seed {run.seed}: {run.label}"
            )
            if outcomes[index].status == "finished":
                log.info("%s is finished already", where)
                continue
            log.info("%s", where)
            try:
                outcomes[index] = _attempt(run, train)
            except KeyboardInterrupt:
                outcomes[index] = _outcome(run, "waiting")
                raise
            finally:
                publish(_comparison(planned, outcomes))
    return _comparison(planned, outcomes)


def _attempt(run: StudyRun, train: Train) -> Outcome:
    try:
        if run.best:
            _require_finished(run)
        else:
            train(run.config, run.folder)
        keep_figures(run)
    except ResourceError:
        raise  # the next method would ask the same of the same cluster
    except FedPPDError as error:
        reason = str(error)
    except Exception as error:  # a defect in one method must not cost the night's other runs
        log.debug("%s, seed %d", run.label, run.seed, exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    else:
        return finished(run) or _outcome(run, "failed", "its figures could not be read back")
    reason = " ".join(reason.split())
    log.error("%s, seed %d failed: %s", run.label, run.seed, reason)
    return _outcome(run, "failed", reason)


def _require_finished(run: StudyRun) -> None:
    """An early-stopped row is the row before it, looked at once more."""
    done = max((line["round"] for line in RunStore(run.folder).history()), default=0)
    if done < run.config.federation.rounds:
        raise CheckpointError(f"its training has done {done} of {run.config.federation.rounds} rounds")


def _outcome(run: StudyRun, status: Status, reason: str | None = None) -> Outcome:
    history = RunStore(run.folder).history()
    return Outcome(run.label, run.seed, run.config.federation.rounds, status, reason, history=history)


def _comparison(planned: Plan, outcomes: Sequence[Outcome]) -> Comparison:
    configs = {run.label: run.config for run in reversed(planned.runs)}
    first = binding(planned.runs[0].config)
    rows = _rows_a_client(outcomes)
    experiment = experiment_of(planned.base, rows)
    ood = planned.base.evaluation.ood
    return Comparison(
        name=f"{planned.base.name}: {len(configs)} methods on {planned.base.data.name}",
        settings=shared_settings(planned.base),
        outcomes=tuple(outcomes),
        differences={label: difference(first, binding(configs[label])) for label in planned.labels},
        rows=rows,
        paper={label: paper_figures(experiment, label, ood) for label in planned.labels},
        paper_rounds=paper_rounds(experiment),
        not_as_paper={label: other_settings(experiment, label, configs[label]) for label in planned.labels},
        also_there=_also_there(planned),
    )


def _also_there(planned: Plan) -> list[str]:
    asked = {run.folder for run in planned.runs}
    found = sorted(path.parent for path in planned.out.glob(f"*/seed-*/{FIGURES}") if path.parent not in asked)
    return [f"{folder.parent.name}, {folder.name.replace('-', ' ')}" for folder in found]


def _rows_a_client(outcomes: Sequence[Outcome]) -> float | None:
    """What a client held on average, by the rounds' own records; None before the first round."""
    held = [line["rows"] / line["clients"] for outcome in outcomes for line in outcome.history if line["clients"]]
    return sum(held) / len(held) if held else None
