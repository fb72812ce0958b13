"""The Python interface: train, compare, and adding what the package does not have. The command line calls the same.

docs/python.md has examples. `fedppd_ray/__init__.py` offers these names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedppd_ray.config.file import Overrides, load_for_method
from fedppd_ray.config.nouns import AGGREGATIONS, METHODS, NETWORKS, SCORES, TRANSFORMS, NetworkSpec
from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import prepare_data
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.inference.scores import Score
from fedppd_ray.methods.base import Method
from fedppd_ray.reports.active import write_study
from fedppd_ray.reports.comparison import write_comparison
from fedppd_ray.runs.batch import Asked, Format, do_part, plan_job
from fedppd_ray.runs.export import load_student, read_card
from fedppd_ray.runs.journal import read_journal
from fedppd_ray.runs.remote import Location, absolute, open_to_read
from fedppd_ray.runs.run import Run
from fedppd_ray.runs.store import RunStore
from fedppd_ray.sites.coordinator import Listen, listen_again
from fedppd_ray.studies import active, comparison
from fedppd_ray.studies.base import all_labels
from fedppd_ray.studies.compared import Comparison

AnyMethod = TypeVar("AnyMethod", bound=type[Method])
AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., Any])


def train(
    config: Config,
    out: Location,
    *,
    observer: Observer | None = None,
    resume: bool = False,
    resume_if_exists: bool = False,
    address: str | None = None,
    serial: bool = False,
    listen: Listen | None = None,
    command: str | None = None,
) -> Run:
    """Train a student from federated clients, from the first or the last saved round to the end.

    Parameters
    ----------
    config: what `load_config` returns.
    out: the run folder, or s3://bucket/prefix.
    observer: is told how the run gets on; see `Observer`.
    resume: continue the run that is there. `resume_if_exists`: continue it, or start one.
    address: a running Ray cluster; None: $RAY_ADDRESS, or a cluster of its own on this machine.
    serial: without Ray, one client after the other: the same bits, slower.
    listen: where clients that are sites of their own join over HTTPS; see docs/sites.md.
    command: the command line that asks for it, for the run's journal and report.
    """
    from fedppd_ray.runtime.driver import train as run_training  # Ray takes seconds to import

    prepare_data(config)
    run_training(
        config,
        out,
        observer or Observer(),
        resume=resume,
        resume_if_exists=resume_if_exists,
        address=address,
        serial=serial,
        listen=listen,
        command=command,
    )
    return Run(out)


def resume(
    location: Location,
    overrides: Overrides = (),
    *,
    observer: Observer | None = None,
    address: str | None = None,
    serial: bool | None = None,
    listen: Listen | None = None,
    command: str | None = None,
) -> Run:
    """Continue a run from its last saved round. Nothing has to be said again: the run folder knows it.

    Parameters: `location`, the run; `overrides`, keys that change from here on, such as federation.quorum or
    federation.rounds; the others as in `train`, each as it was before unless it is given.
    """
    with open_to_read(location) as run:
        config = RunStore(run.folder).config(overrides)
        journal = read_journal(run.folder)
    before = journal[-1].get("options", {}) if journal else {}
    door = before.get("listen")
    return train(
        config,
        location,
        observer=observer,
        resume=True,
        address=address if address is not None else before.get("address"),
        serial=serial if serial is not None else bool(before.get("serial")),
        listen=listen or (listen_again(door) if door else None),
        command=command,
    )


def compare(
    config: Path | str,
    out: Path | str,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    overrides: Overrides = (),
    early_stop: bool = False,
    observer: Callable[[], Observer] = Observer,
    address: str | None = None,
    serial: bool = False,
    command: str | None = None,
) -> Comparison:
    """Several methods on the same clients' rows: runs what is not finished yet, writes table, plots and report.

    Parameters
    ----------
    config: a YAML file, or the name of one that comes with the package.
    out: the folder; the same call again continues there.
    methods: labels (`fedppd methods` lists them), or `label=other.yaml`; None: all of them.
    seeds, rounds: of every method; None: the configuration's.
    overrides: as in `load_config`.
    early_stop: adds a row to each method, the same run at the round of its lowest NLL on calibration rows.
    observer: makes the observer of each run.
    address, serial, command: as in `train`.
    """
    planned = comparison.plan(
        config,
        ",".join(methods or all_labels()),
        str(out),
        seeds=None if seeds is None else ",".join(map(str, seeds)),
        rounds=rounds,
        settings=overrides,
        early_stop=early_stop,
    )
    prepare_data(planned.base)

    def run(resolved: Config, folder: Path) -> None:
        how: dict[str, Any] = {"address": address, "serial": serial, "command": command}
        train(resolved, folder, observer=observer(), resume_if_exists=True, **how)

    return comparison.compare(planned, run, partial(write_comparison, planned.out))


def study_active(
    config: Path | str,
    out: Path | str,
    *,
    methods: Sequence[str],
    steps: int | None = None,
    overrides: Overrides = (),
    observer: Callable[[], Observer] = Observer,
    address: str | None = None,
    serial: bool = False,
) -> active.Study:
    """Federated active learning, every method by score and by chance; parameters as in `compare`.

    `steps` is the number of trainings; None: until the clients' pools are empty.
    """
    from fedppd_ray.runtime.driver import train as run_training

    planned = active.plan(config, ",".join(methods), str(out), steps=steps, settings=overrides)
    prepare_data(planned.base)

    def run(resolved: Config, folder: Path, states: Sequence[GlobalState]) -> None:
        run_training(
            resolved,
            folder,
            observer(),
            resume_if_exists=True,
            address=address,
            serial=serial,
            acquisition_states=states,
        )

    return active.study(planned, run, partial(write_study, planned.out))


def predict_files(
    run: Location,
    inputs: Sequence[Path],
    out: Path,
    *,
    form: Format = "parquet",
    part_rows: int = 10_000,
    coverage: float | None = None,
    confidence: float | None = None,
    address: str | None = None,
    serial: bool = False,
    started: Callable[[int, int], None] = lambda done, rows: None,
    progress: Callable[[int], None] = lambda rows: None,
) -> int:
    """Answers for the rows of large files, as files in a folder; the same call continues one that was stopped.

    Parameters
    ----------
    inputs: .npy files or folders of images, or CSV and Parquet files for a student of tables.
    out: the folder; it gets part-000000.parquet (or .csv) and so on, each of `part_rows` rows.
    coverage: another share of answered rows than the export's default.
    confidence: with which each answer's `set` of classes holds the right one.
    address, serial: as in `train`. The files must be readable, and the folder writable, on every node.
    started: is told how many rows are there already, and how many there are.
    progress: is told the rows of each part as it is written.

    Returns the number of rows, of this call and of those before it.
    """
    job = plan_job(absolute(run), read_card(run), inputs, out.resolve(), form, Asked(coverage, confidence), part_rows)
    rows = sum(part.rows for part in job.parts)
    started(rows - sum(part.rows for part in job.waiting), rows)
    if serial:
        student = load_student(run)
        for part in job.waiting:
            progress(do_part(student, job, part))
    else:
        from fedppd_ray.runtime.batch import run_job

        run_job(job, progress, address)
    return rows


def study_base(config: Path | str, overrides: Overrides = ()) -> Config:
    """The configuration that the runs of a study start from."""
    return load_for_method(config, overrides, ())


# ---- adding what the package does not have


def register_method(method: AnyMethod) -> AnyMethod:
    """Make a method known by its `name`; a class decorator.

    Define it in a module that other processes can import (a Ray worker does so by itself).
    """
    METHODS.register(method.name, method, method.__module__)
    return method


def register_network(
    name: str, *, shape: tuple[int, int, int] | None = None, channels: int | None = None
) -> Callable[[AnyBuilder], AnyBuilder]:
    """Make a network known by name; decorates a class or function called with (shape, classes).

    Parameters: `shape`, the only (channels, height, width) that it takes; `channels`, where only their number matters.
    """

    def register(build: AnyBuilder) -> AnyBuilder:
        NETWORKS.register(name, NetworkSpec(shape, build, channels), build.__module__)
        return build

    return register


def register_score(score: Score) -> Score:
    """Make a score known by its name, for `evaluation.score`."""
    SCORES.register(score.name, score, score.function.__module__)
    return score


def register_aggregation(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Make an aggregation rule known, for `federation.aggregation`; decorates a class made of role → length."""

    def register(rule: AnyBuilder) -> AnyBuilder:
        AGGREGATIONS.register(name, rule, rule.__module__)
        return rule

    return register


def register_transform(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Make an update transform known, for `client.transforms`; decorates a function (update, state, seed) → update."""

    def register(transform: AnyBuilder) -> AnyBuilder:
        TRANSFORMS.register(name, transform, transform.__module__)
        return transform

    return register
