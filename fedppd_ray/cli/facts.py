"""`fedppd data sums` and `fedppd data facts`: the facts of tables that stay where they are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedppd_ray.cli.options import AddressOption
from fedppd_ray.errors import ConfigError

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file: data.table.target, …")]


def sums(
    config: ConfigArgument,
    table: Annotated[Path, typer.Argument(metavar="FILE", help="This client's CSV or Parquet file.")],
) -> None:
    """Print what leaves a client of its table: per column counts, sums, extremes and categories. No row does."""
    from fedppd_ray.data.sums_file import sums_of_file, write_sums

    print(write_sums(sums_of_file(table, _table(_values(config)))))


def facts(
    config: ConfigArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SUMS...", help="What `fedppd data sums` printed at each client; none: ask by Ray."),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Print the section data.table, complete, from clients' sums; without files, of clients.*.data on their nodes."""
    import yaml

    from fedppd_ray.data.sums_file import read_sums, section_of
    from fedppd_ray.data.table import Sums

    values = _values(config)
    parts: list[Sums] = [read_sums(file) for file in files or ()]
    if not parts:
        from fedppd_ray.runtime.table_sums import ask_clients

        parts = ask_clients(_clients(values), _table(values), address)
    section = section_of(parts, _table(values))
    print(yaml.safe_dump({"data": {"table": section}}, sort_keys=False, allow_unicode=True), end="")


def _values(config: Path) -> dict[str, Any]:
    import yaml

    from fedppd_ray.config.file import find_config

    try:
        values = yaml.safe_load(find_config(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{config}: cannot be read ({' '.join(str(error).split())})") from None
    return values if isinstance(values, dict) else {}


def _table(values: dict[str, Any]) -> dict[str, Any]:
    """What the user said of the table, without facts that an earlier look may have left there."""
    section = (values.get("data") or {}).get("table") or {}
    return {key: value for key, value in section.items() if key not in ("classes", "columns", "clients")}


def _clients(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {name: own for name, own in (values.get("clients") or {}).items() if (own or {}).get("data")}
    if not found:
        raise ConfigError(
            "clients: none has data of its own; name each one's file, as client-00: {data: /data/rows.csv}, or give "
            "what `fedppd data sums` printed at each client"
        )
    return found
