"""Arguments and options that several commands have in common."""

from typing import Annotated

import typer

# Text, not a Path, which would turn s3://bucket into s3:/bucket.
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder or s3:// URL, as `fedppd train --out` made it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Folder of the data files.", envvar="FEDPPD_DATA", show_default=False),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set federation.rounds=4."),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="A running Ray cluster. Default: $RAY_ADDRESS, or one of our own."),
]
SerialOption = Annotated[
    bool, typer.Option("--serial", help="Without Ray, one client after the other: the same bits, slower.")
]
