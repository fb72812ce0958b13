"""Several methods on the same clients' rows, side by side.

Every method and seed is an ordinary run, `<out>/<method>/seed-<seed>`, with its figures beside it in `figures.json`.
That is all the state there is: the same call again skips what is finished and continues the rest where it stopped.
"""

import fcntl
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedppd_ray.checkpoint.files import write_json
from fedppd_ray.checkpoint.remote import is_url
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.config import Config
from fedppd_ray.config_data import suggest
from fedppd_ray.config_file import load_config
from fedppd_ray.config_identity import binding, config_hash, difference, flatten
from fedppd_ray.errors import CheckpointError, ConfigError, FedPPDError, ResourceError
from fedppd_ray.evaluation.compare_report import write_comparison
from fedppd_ray.evaluation.compared import Comparison, Outcome, Status, curves_of
from fedppd_ray.evaluation.paper import other_settings, paper_figures, regime_of
from fedppd_ray.evaluation.run import evaluate_predictor
from fedppd_ray.methods import build_method
from fedppd_ray.methods.fedswag import MEAN

log = logging.getLogger("fedppd")

# What a name of `--methods` changes in the configuration, written as `--set` takes it.
METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": ("method=fedavg", "baseline.network=teacher"),
    "fedavg_student": ("method=fedavg", "baseline.network=student"),
    "fedbe": ("method=fedbe",),
    "fedswag": ("method=fedswag",),
    "fedpa": ("method=fedpa",),
    "fedppd": ("method=fedppd", "server.aggregate=average"),
    "fedppd_distill": ("method=fedppd", "server.aggregate=distill"),
}
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FIGURES, _FORMAT = "figures.json", 1

Train = Callable[[Config, Path], None]  # starts or continues the run of this folder, and ends with its last round


@dataclass(frozen=True)
class Run:
    label: str
    seed: int
    config: Config
    folder: Path


@dataclass(frozen=True)
class Plan:
    out: Path
    base: Config
    runs: tuple[Run, ...]  # seeds outside, methods inside: the first whole table is there soonest

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))


# ---- the plan


def plan(
    config: Path,
    methods: str,
    out: str,
    *,
    seeds: str | None = None,
    rounds: int | None = None,
    settings: Sequence[str] = (),
) -> Plan:
    """Read and check everything before anything runs. `methods` and `seeds` are lists with commas."""
    if is_url(out):
        raise ConfigError(f"--out {out}: a comparison needs a local folder")
    chosen = [*settings, *([f"federation.rounds={rounds}"] if rounds else [])]
    base = load_config(config, chosen)
    sources = parse_methods(methods, config)
    runs = []
    for seed in parse_seeds(seeds, base.seed):
        for label, (path, changes) in sources.items():
            name = json.dumps(f"{base.name}-{label}-{seed}")
            try:
                resolved = load_config(path, [*chosen, *changes, f"seed={seed}", f"name={name}"])
            except ConfigError as error:
                raise ConfigError(f"{label}: {error}") from None
            require_same_data(label, base, resolved)
            # The same questions to everybody, whatever another file says.
            resolved = resolved.model_copy(update={"evaluation": base.evaluation})
            runs.append(Run(label, seed, resolved, Path(out) / label / f"seed-{seed}"))
    return Plan(Path(out), base, tuple(runs))


def parse_methods(text: str, config: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Label → the file to read and what to change in it. `label=other.yaml` is another file as it is."""
    sources: dict[str, tuple[Path, tuple[str, ...]]] = {}
    for entry in (part.strip() for part in text.split(",")):
        label, separator, path = entry.partition("=")
        if label in sources:
            raise ConfigError(f"--methods: {label!r} stands there twice")
        if separator:
            if not _LABEL.fullmatch(label) or label in METHODS:
                raise ConfigError(
                    f"--methods {entry}: {label!r} must be a name of letters, digits, '_', '-' and '.' that no "
                    f"method has"
                )
            sources[label] = (Path(path), ())
        elif label in METHODS:
            sources[label] = (config, METHODS[label])
        else:
            raise ConfigError(f"--methods: unknown method {label!r}{suggest(label, METHODS)}")
    return sources


def parse_seeds(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ConfigError(f"--seeds {text}: write different whole numbers with commas, for example 0,1,2")
    return [int(part) for part in parts]


def require_same_data(label: str, base: Config, other: Config) -> None:
    """The partition follows from these keys and the seed: only then do methods have the same rows."""

    def of_data(config: Config) -> dict[str, object]:
        return {
            key: value
            for key, value in flatten(config).items()
            if key.startswith("data.") or key == "federation.clients" or re.fullmatch(r"clients\..*\.data", key)
        }

    lines = difference(of_data(base), of_data(other))
    if lines:
        raise ConfigError(
            f"{label}: not the same data ({'; '.join(lines)}); give both files the same data section and "
            f"federation.clients"
        )


def require_own_folder(run: Run) -> None:
    """A folder of another comparison is refused before the first round, not after hours."""
    store = RunStore(run.folder)
    if not store.exists() or not store.has_rounds():
        return
    lines = difference(binding(store.config()), binding(run.config))
    if lines:
        raise CheckpointError(
            f"{run.folder} was started with another config ({'; '.join(lines)}); use its own, or a new --out"
        )
    done = max((line["round"] for line in store.history()), default=0)
    if done > run.config.federation.rounds:
        raise CheckpointError(
            f"federation.rounds: {run.folder} is at round {done} already, past {run.config.federation.rounds}; ask for "
            f"as many or more, or choose another --out"
        )


# ---- the comparison


def compare(planned: Plan, train: Train) -> Comparison:
    """Run what is not finished yet. A run that fails is reported as such, and the rest goes on."""
    for run in planned.runs:
        require_own_folder(run)
    with locked(planned.out):
        outcomes = [finished(run) or _outcome(run, "waiting") for run in planned.runs]
        write_comparison(planned.out, _comparison(planned, outcomes))
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
                write_comparison(planned.out, _comparison(planned, outcomes))
    return _comparison(planned, outcomes)


def _attempt(run: Run, train: Train) -> Outcome:
    try:
        train(run.config, run.folder)
        keep_figures(run)
    except ResourceError:
        raise  # the next method would ask the same of the same cluster
    except FedPPDError as error:
        reason = str(error)
    except Exception as error:  # a defect in one method must not cost the night's other runs
        log.exception("%s, seed %d", run.label, run.seed)
        reason = f"{type(error).__name__}: {error}"
    else:
        return finished(run) or _outcome(run, "failed", "its figures could not be read back")
    reason = " ".join(reason.split())
    log.error("%s, seed %d failed: %s", run.label, run.seed, reason)
    return _outcome(run, "failed", reason)


def _outcome(run: Run, status: Status, reason: str | None = None) -> Outcome:
    history = RunStore(run.folder).history()
    return Outcome(run.label, run.seed, run.config.federation.rounds, status, reason, history=history)


def keep_figures(run: Run) -> None:
    """Keep the figures of the method's own predictor, from the newest checkpoint, beside the run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = RunStore(run.folder).latest()
    if run.config.method == "fedswag" and MEAN not in state.models:
        raise CheckpointError(
            f"{run.folder} was trained for more rounds than {state.round}: the snapshots of SWAG's last round were not "
            f"taken; ask for more rounds, or choose another --out"
        )
    method = build_method(run.config, device)
    with _one_thread():
        evaluation = evaluate_predictor(run.config, method.predictor(state.models), device)
    content = {**_identity(run.config, state.round), "figures": evaluation.figures, "curves": curves_of(evaluation)}
    write_json(run.folder / _FIGURES, content)


def _identity(config: Config, round_id: int) -> dict[str, Any]:
    """What figures depend on: those of an earlier round, or against another set, are made anew."""
    return {"format": _FORMAT, "round": round_id, "config_hash": config_hash(config), "ood": config.evaluation.ood}


def finished(run: Run) -> Outcome | None:
    """The outcome of a run whose figures are there, without opening its checkpoints."""
    try:
        kept = json.loads((run.folder / _FIGURES).read_text(encoding="utf-8"))
        identity = _identity(run.config, run.config.federation.rounds)
        if any(kept[key] != value for key, value in identity.items()):
            return None
        figures, curves = dict(kept["figures"]), dict(kept["curves"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there yet, or not ours: the checkpoint can make it again
    history = RunStore(run.folder).history()
    return Outcome(run.label, run.seed, run.config.federation.rounds, "finished", None, figures, curves, history)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The arithmetic of the training's evaluation: the number of threads may change the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time in a folder; the lock goes with the process, so a crash cannot leave it."""
    if RunStore(folder).exists():
        raise ConfigError(f"--out {folder} holds a run of its own, whose report would be overwritten; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); choose another --out") from None
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another command is at work there; wait for it, or stop it") from None
        yield


def _comparison(planned: Plan, outcomes: Sequence[Outcome]) -> Comparison:
    configs = {run.label: run.config for run in reversed(planned.runs)}
    first = binding(planned.runs[0].config)
    rows = _rows_a_client(outcomes)
    regime = regime_of(planned.base, rows)
    ood = planned.base.evaluation.ood
    return Comparison(
        name=f"{planned.base.name}: {len(configs)} methods on {planned.base.data.name}",
        settings=planned.base.model_dump(mode="json", exclude={"seed": True, "method": True, "data": {"root"}}),
        outcomes=tuple(outcomes),
        differences={label: difference(first, binding(configs[label])) for label in planned.labels},
        rows=rows,
        paper={label: paper_figures(regime, label, ood) for label in planned.labels},
        paper_rounds=regime.rounds if regime else None,
        not_as_paper={label: other_settings(regime, label, configs[label]) for label in planned.labels},
        also_there=_also_there(planned),
    )


def _also_there(planned: Plan) -> list[str]:
    asked = {run.folder for run in planned.runs}
    found = sorted(path.parent for path in planned.out.glob(f"*/seed-*/{_FIGURES}") if path.parent not in asked)
    return [f"{folder.parent.name}, {folder.name.replace('-', ' ')}" for folder in found]


def _rows_a_client(outcomes: Sequence[Outcome]) -> float | None:
    """What a client held on average, by the rounds' own records; None before the first round."""
    held = [line["rows"] / line["clients"] for outcome in outcomes for line in outcome.history if line["clients"]]
    return sum(held) / len(held) if held else None
