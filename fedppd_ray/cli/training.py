"""The commands that make one run: `fedppd train` and `fedppd resume`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedppd_ray.cli.completion import config_names
from fedppd_ray.cli.console import fail
from fedppd_ray.cli.options import (
    DEFAULT_GUESTS,
    AddressOption,
    CertificateKeyOption,
    CertificateOption,
    ClientAuthorityOption,
    GuestsOption,
    ListenOption,
    RunArgument,
    SerialOption,
    SettingsOption,
)


def this_command() -> str:
    """As it was typed: for a run's journal and report, and for who has to repeat it."""
    return shlex.join(["fedppd", *sys.argv[1:]])


def train(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML file, or the name of one that comes along: quickstart.",
            autocompletion=config_names,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", help="The run folder, or s3://bucket/prefix. Default: runs/<name of the config>."),
    ] = None,
    settings: SettingsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last saved round.")] = False,
    resume_if_exists: Annotated[
        bool, typer.Option("--resume-if-exists", help="Continue the run if there is one, else start it (for retries).")
    ] = False,
    address: AddressOption = None,
    serial: SerialOption = False,
    listen: ListenOption = None,
    certificate: CertificateOption = None,
    certificate_key: CertificateKeyOption = None,
    client_authority: ClientAuthorityOption = None,
    guests: GuestsOption = DEFAULT_GUESTS,
) -> None:
    """Train a student from federated clients. Ctrl-C stops; `fedppd resume` continues."""
    from fedppd_ray.api import train as train_run
    from fedppd_ray.cli.display import open_display
    from fedppd_ray.config.file import load_config
    from fedppd_ray.sites.coordinator import parse_listen

    resolved = load_config(config, settings or [])
    folder = out or f"runs/{resolved.name}"
    door = parse_listen(listen, certificate, certificate_key, guests, client_authority) if listen else None
    try:
        train_run(
            resolved,
            folder,
            observer=open_display(),
            resume=resume,
            resume_if_exists=resume_if_exists,
            address=address,
            serial=serial,
            listen=door,
            command=this_command(),
        )
    except KeyboardInterrupt:
        _stopped(folder)
    _done(folder)


def resume(
    run: RunArgument,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key from here on: federation.quorum, .rounds, resources.*, …"
        ),
    ] = None,
    address: AddressOption = None,
    serial: Annotated[
        bool | None, typer.Option("--serial/--ray", help="Without Ray, or on it. Default: as before.")
    ] = None,
    listen: ListenOption = None,
    certificate: CertificateOption = None,
    certificate_key: CertificateKeyOption = None,
    client_authority: ClientAuthorityOption = None,
    guests: GuestsOption = DEFAULT_GUESTS,
) -> None:
    """Continue a run from its last saved round: with its own configuration, and in the way it ran before."""
    from fedppd_ray.api import resume as resume_run
    from fedppd_ray.cli.display import open_display
    from fedppd_ray.sites.coordinator import parse_listen

    door = parse_listen(listen, certificate, certificate_key, guests, client_authority) if listen else None
    try:
        resume_run(
            run,
            settings or [],
            observer=open_display(),
            address=address,
            serial=serial,
            listen=door,
            command=this_command(),
        )
    except KeyboardInterrupt:
        _stopped(run)
    _done(run)


def _done(folder: Path | str) -> None:
    from fedppd_ray.reports.run import report_run

    print(f"run folder: {folder}   report: {report_run(folder)}")


def _stopped(folder: Path | str) -> NoReturn:
    again = shlex.join(["fedppd", "resume", str(folder)])
    fail(f"stopped; every finished round is saved. Continue with: {again}", 130)
