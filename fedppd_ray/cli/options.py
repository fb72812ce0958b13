"""Arguments and options that several commands have in common."""

from pathlib import Path
from typing import Annotated

import typer

from fedppd_ray.cli.completion import key_names

# Text, not a Path, which would turn s3://bucket into s3:/bucket.
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder or s3:// URL, as `fedppd train --out` made it.")
]
ServedArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run, or a registry (`fedppd promote`): a folder or s3:// URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Folder of the data files.", envvar="FEDPPD_DATA", show_default=False),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, e.g. --set federation.rounds=4; `fedppd config` lists them.",
        autocompletion=key_names,
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A running Ray cluster. Default: $RAY_ADDRESS, or one of our own."),
]
SerialOption = Annotated[
    bool, typer.Option("--serial", help="Without Ray, one client after the other: the same bits, slower.")
]
GuestsOption = Annotated[
    Path,
    typer.Option("--sites", help="The coordinator's folder: its key, its sites, invitations.", envvar="FEDPPD_SITES"),
]
HomeOption = Annotated[
    Path, typer.Option("--home", help="The site's folder: key, policy, audit log.", envvar="FEDPPD_SITE")
]
ListenOption = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where sites of their own join, over HTTPS.")
]
CertificateOption = Annotated[Path | None, typer.Option("--tls-cert", help="The certificate of that address (PEM).")]
CertificateKeyOption = Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")]
ClientAuthorityOption = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", help="Let in only who shows a certificate of this authority (PEM): mutual TLS."),
]
DEFAULT_GUESTS = Path("~/.fedppd/coordinator").expanduser()
DEFAULT_HOME = Path("~/.fedppd/site").expanduser()
