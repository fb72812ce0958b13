"""The commands that make many runs: `fedppd compare` and `fedppd active`."""

from typing import Annotated, NoReturn

import typer

from fedppd_ray.cli.completion import config_names
from fedppd_ray.cli.console import fail
from fedppd_ray.cli.options import AddressOption, SerialOption, SettingsOption
from fedppd_ray.cli.training import this_command


def compare(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML file, or a name: data, clients and settings of all.",
            autocompletion=config_names,
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Labels with commas, as `fedppd methods` lists them; warm=fedppd:teacher.temperature=1 adds one with "
            "settings of its own, other=file.yaml another configuration on the same data. Default: all of them.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds of every method.")] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="With commas, e.g. 0,1,2: mean ± sd. Default: the config's seed.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="The folder. Default: runs/compare-<name of the config>.")
    ] = None,
    early_stop: Annotated[
        bool,
        typer.Option(
            "--early-stop", help="Also each method at the round of its lowest NLL on calibration rows: <label>+early."
        ),
    ] = False,
    settings: SettingsOption = None,
    address: AddressOption = None,
    serial: SerialOption = False,
) -> None:
    """Methods side by side on the same clients' rows: a table, plots and report.html, renewed after every run.

    Ctrl-C stops. The same command again continues where it stopped; finished runs are not repeated.
    """
    from fedppd_ray import api
    from fedppd_ray.cli.display import open_display
    from fedppd_ray.reports.comparison import table
    from fedppd_ray.studies.comparison import parse_seeds

    chosen = settings or []
    base = api.study_base(config, chosen)
    folder = out or f"runs/compare-{base.name}"
    try:
        done = api.compare(
            config,
            folder,
            methods=None if methods is None else methods.split(","),
            seeds=parse_seeds(seeds, base.seed),
            rounds=rounds,
            overrides=chosen,
            early_stop=early_stop,
            observer=open_display,
            address=address,
            serial=serial,
            command=this_command(),
        )
    except KeyboardInterrupt:
        _stopped()
    print(f"{table(done)}\nfolder: {folder}   report: {folder}/report.html")
    failed = [f"{outcome.label} (seed {outcome.seed})" for outcome in done.outcomes if outcome.status == "failed"]
    if failed:
        fail(f"failed: {', '.join(failed)}; reasons above. The same command tries again.", 1)


def active(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a name, with an active section.")],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="With commas, as in `fedppd compare`; each by its score and by chance. Default: two."
        ),
    ] = None,
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
    from fedppd_ray import api
    from fedppd_ray.cli.display import open_display
    from fedppd_ray.methods import ACTIVE_ROWS
    from fedppd_ray.reports.active import table

    chosen = settings or []
    folder = out or f"runs/{api.study_base(config, chosen).name}"
    try:
        done = api.study_active(
            config,
            folder,
            methods=ACTIVE_ROWS if methods is None else methods.split(","),
            steps=steps,
            overrides=chosen,
            observer=open_display,
            address=address,
            serial=serial,
        )
    except KeyboardInterrupt:
        _stopped()
    print(f"{table(done)}\nfolder: {folder}   report: {folder}/report.html")
    if done.failed:
        failed = ", ".join(f"{method} ({acquisition})" for method, acquisition in done.failed)
        fail(f"failed: {failed}; reasons above. The same command tries again.", 1)


def _stopped() -> NoReturn:
    fail(f"stopped; every finished round is saved. Continue with the same command: {this_command()}", 130)
