"""The commands that make many runs: `fedppd compare` and `fedppd active`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedppd_ray.cli_options import AddressOption, SerialOption, SettingsOption
from fedppd_ray.console import fail


def compare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file: data, clients and settings of all.")],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="With commas: fedavg, fedavg_student, fedbe, fedswag, fedpa, fedppd, fedppd_distill; label=other.yaml "
            "adds another configuration on the same data. Default: all seven.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of every method.")] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="With commas, e.g. 0,1,2: mean ± sd. Default: the config's seed.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="The folder. Default: runs/compare-<name of the config>.")
    ] = None,
    settings: SettingsOption = None,
    address: AddressOption = None,
    serial: SerialOption = False,
) -> None:
    """Methods side by side on the same clients' rows: a table, plots and report.html, renewed after every run.

    Ctrl-C stops. The same command again continues where it stopped; finished runs are not repeated.
    """
    from fedppd_ray.comparison import METHODS, plan
    from fedppd_ray.comparison import compare as compare_methods
    from fedppd_ray.config import Config
    from fedppd_ray.config_file import load_config
    from fedppd_ray.data.holdings import prepare_data
    from fedppd_ray.evaluation.compare_report import table
    from fedppd_ray.progress import open_display
    from fedppd_ray.runtime.driver import train as run_training

    def run(resolved: Config, folder: Path) -> None:
        with open_display() as display:
            run_training(resolved, folder, display, resume_if_exists=True, address=address, serial=serial)

    folder = out or f"runs/compare-{load_config(config, settings or []).name}"
    chosen = ",".join(METHODS) if methods is None else methods
    planned = plan(config, chosen, folder, seeds=seeds, rounds=rounds, settings=settings or [])
    prepare_data(planned.base)
    try:
        done = compare_methods(planned, run)
    except KeyboardInterrupt:
        _stopped()
    print(f"{table(done)}\nfolder: {folder}   report: {folder}/report.html")
    failed = [f"{outcome.label} (seed {outcome.seed})" for outcome in done.outcomes if outcome.status == "failed"]
    if failed:
        fail(f"failed: {', '.join(failed)}; reasons above. The same command tries again.", 1)


def active(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file with an active section.")],
    methods: Annotated[
        str, typer.Option("--methods", help="With commas, as in `fedppd compare`; every one with entropy and chance.")
    ] = "fedavg,fedppd",
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Trainings of each. Default: until the pools are empty.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="The folder. Default: runs/<name of the config>.")] = None,
    settings: SettingsOption = None,
    address: AddressOption = None,
    serial: SerialOption = False,
) -> None:
    """Active learning: clients label what the global model is least sure of; random choice is the control.

    Ctrl-C stops. The same command again continues where it stopped; finished trainings are not repeated.
    """
    from fedppd_ray.active import plan, study
    from fedppd_ray.config import Config
    from fedppd_ray.config_file import load_config
    from fedppd_ray.core.types import GlobalState
    from fedppd_ray.data.holdings import prepare_data
    from fedppd_ray.evaluation.active_report import table
    from fedppd_ray.progress import open_display
    from fedppd_ray.runtime.driver import train as run_training

    def run(resolved: Config, folder: Path, ranked_by: Sequence[GlobalState]) -> None:
        with open_display() as display:
            run_training(
                resolved,
                folder,
                display,
                resume_if_exists=True,
                address=address,
                serial=serial,
                ranked_by=ranked_by,
            )

    base = load_config(config, settings or [])
    folder = out or f"runs/{base.name}"
    planned = plan(config, methods, folder, steps=steps, settings=settings or [])
    prepare_data(base)
    try:
        done = study(planned, run)
    except KeyboardInterrupt:
        _stopped()
    print(f"{table(done)}\nfolder: {folder}   report: {folder}/report.html")
    if done.failed:
        failed = ", ".join(f"{method} ({acquisition})" for method, acquisition in done.failed)
        fail(f"failed: {failed}; reasons above. The same command tries again.", 1)


def _stopped() -> NoReturn:
    again = shlex.join(["fedppd", *sys.argv[1:]])
    fail(f"stopped; every finished round is saved. Continue with the same command: {again}", 130)
