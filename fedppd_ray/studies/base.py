"""What studies have in common: runs beside each other in one folder, each with its figures beside it.

Every run is an ordinary one. Its figures are all the state there is: the same call again skips what is finished and
continues the rest where it stopped.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedppd_ray import __version__
from fedppd_ray.config.identity import binding, difference, flatten
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.evaluation.run import evaluate_predictor
from fedppd_ray.methods import build_method, compare_rows
from fedppd_ray.registry import suggest
from fedppd_ray.runs import lock
from fedppd_ray.runs.files import write_json
from fedppd_ray.runs.layout import BEST_FIGURES, FIGURES
from fedppd_ray.runs.run import teacher_of
from fedppd_ray.runs.store import RunStore
from fedppd_ray.studies.compared import Outcome, curves_of

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SETTING = re.compile(r":(?=[a-z_][a-z_.]*=)")  # before a setting, and not in `package.module:Class`
_SAME = ("seed", "name", "method", "data", "evaluation", "federation.clients", "clients")
_FORMAT = 1


@dataclass(frozen=True)
class StudyRun:
    label: str
    seed: int
    config: Config
    folder: Path
    best: bool = False  # judged at the round of the lowest NLL on calibration rows, not at the last

    @property
    def figures(self) -> Path:
        return self.folder / (BEST_FIGURES if self.best else FIGURES)


# A label → the file to read, and what to change in it.
Sources = dict[str, tuple[Path | str, tuple[str, ...]]]


def all_labels() -> list[str]:
    """Every row that a comparison may have."""
    return list(compare_rows())


def parse_methods(text: str, config: Path | str) -> Sources:
    """Label → the file to read and what to change in it.

    `label=other.yaml` is another file as it is, `label=fedppd:teacher.temperature=1` a row with settings of its own.
    """
    sources: Sources = {}
    rows = compare_rows()
    for entry in (part.strip() for part in text.split(",")):
        label, separator, path = entry.partition("=")
        if label in sources:
            raise ConfigError(f"--methods: {label!r} stands there twice")
        if separator:
            if not _LABEL.fullmatch(label) or label in rows:
                raise ConfigError(
                    f"--methods {entry}: {label!r} must be a name of letters, digits, '_', '-' and '.' that no "
                    f"method has"
                )
            sources[label] = _variant(path, config)
        elif label in rows:
            sources[label] = (config, rows[label].changes)
        else:
            raise ConfigError(f"--methods: unknown method {label!r}{suggest(label, list(rows))}")
    return sources


def _variant(text: str, config: Path | str) -> tuple[Path | str, tuple[str, ...]]:
    """A row's label with settings, `fedppd:client.epochs=2:student.rate=0.1`; anything else is a file."""
    base, *settings = _SETTING.split(text)
    row = compare_rows().get(base)
    if row is None:
        return text, ()
    if not settings:
        raise ConfigError(f"--methods …={text}: give it a setting of its own, for example {text}:client.epochs=2")
    for setting in settings:
        key = setting.partition("=")[0]
        if key in _SAME or key.partition(".")[0] in _SAME:
            raise ConfigError(f"--methods …={text}: {key} is the same for all methods of a comparison; use --set")
    return config, (*row.changes, *settings)


def require_read(label: str, changes: Sequence[str], config: Config) -> None:
    """What a row sets must be read by its method: else it would be another name for the same."""
    known = flatten(config)
    for change in changes:
        key = change.partition("=")[0]
        if not any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in known):
            raise ConfigError(f"{label}: {key}: method {config.method} does not read it; remove it")


def require_same_data(label: str, base: Config, other: Config) -> None:
    """The partition follows from these keys and the seed: only then do methods have the same rows."""

    def of_data(config: Config) -> dict[str, object]:
        found = {
            key: value
            for key, value in flatten(config).items()
            if key.startswith("data.") or key == "federation.clients" or re.fullmatch(r"clients\..*\.data", key)
        }
        # Whether a pool is used or only reserved makes no difference to who holds what.
        pools = [found.pop("data.server_pool", 0), found.pop("data.reserved", 0)]
        return {**found, "data.server_pool": max(map(int, map(str, pools)))}

    lines = difference(of_data(base), of_data(other))
    if lines:
        raise ConfigError(
            f"{label}: not the same data ({'; '.join(lines)}); give both files the same data section and "
            f"federation.clients"
        )


def shared_settings(base: Config) -> dict[str, Any]:
    """The configuration that all runs of a study start from, for its report."""
    values = base.values()
    for key in ("seed", "method"):
        values.pop(key)
    values["data"].pop("root")
    return values


def require_own_folder(run: StudyRun) -> None:
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


def keep_figures(run: StudyRun) -> None:
    """Keep the figures of the method's own predictor, from the newest checkpoint or the best, beside the run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = RunStore(run.folder)
    state = store.best() if run.best else store.latest()
    last = max(line["round"] for line in store.history())
    method = build_method(run.config, device)
    if not method.complete(state.models):
        raise CheckpointError(
            f"{run.folder} was trained for more rounds than {state.round}: what {run.config.method} does in its last "
            f"round is not there; ask for more rounds, or choose another --out"
        )
    with _one_thread():
        evaluation = evaluate_predictor(
            run.config, method.predictor(state.models), device, clients=store.clients() if store.has_clients() else []
        )
    figures = {**evaluation.figures, **teacher_of(store.history(), state.round)}
    if run.best:
        figures["round"] = state.round
    content = {
        **_identity(run.config, last),
        "version": __version__,  # that made them; a later one may compute other bits
        "figures": figures,
        "curves": curves_of(evaluation),
    }
    write_json(run.figures, content)


def _identity(config: Config, round_id: int) -> dict[str, Any]:
    """What figures depend on, besides the run's own configuration: those of an earlier round are made anew."""
    names = config.evaluation.ood_names
    ood = config.evaluation.ood if len(names) < 2 else list(names)
    asked = {"corruptions": True} if config.evaluation.corruptions else {}
    return {"format": _FORMAT, "round": round_id, "ood": ood, **asked}


def finished(run: StudyRun) -> Outcome | None:
    """The outcome of a run whose figures are there, without opening its checkpoints.

    The configuration that was stored is read again and compared key by key: a setting that came later has its default
    on both sides, so a finished run stays finished.
    """
    store = RunStore(run.folder)
    try:
        kept = json.loads(run.figures.read_text(encoding="utf-8"))
        identity = _identity(run.config, run.config.federation.rounds)
        if any(kept[key] != value for key, value in identity.items()):
            return None
        figures, curves = dict(kept["figures"]), dict(kept["curves"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there yet, or not ours: the checkpoint can make it again
    if difference(binding(store.config()), binding(run.config)):
        return None
    history = store.history()
    if run.best:  # what a run that stops there has done
        history = [line for line in history if line["round"] <= figures["round"]]
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
    """One command at a time in the folder of a study."""
    if RunStore(folder).exists():
        raise ConfigError(f"--out {folder} holds a run of its own, whose report would be overwritten; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); choose another --out") from None
    with lock.locked(folder):
        yield
