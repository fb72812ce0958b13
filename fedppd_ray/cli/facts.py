"""`fedppd data sums` and `fedppd data facts`: the facts of tables and images that stay where they are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedppd_ray.cli.options import AddressOption
from fedppd_ray.errors import ConfigError

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file: data.table.target, …")]


def sums(
    config: ConfigArgument,
    place: Annotated[Path, typer.Argument(metavar="PLACE", help="This client's CSV or Parquet file, or its folder.")],
) -> None:
    """Print what leaves a client: per column counts, sums, extremes and categories; of images sums per channel."""
    from fedppd_ray.data.image_sums import ImageSums, write_image_sums
    from fedppd_ray.data.own import sums_at
    from fedppd_ray.data.sums_file import write_sums

    found = sums_at(str(place), _data(_values(config)))
    print(write_image_sums(found) if isinstance(found, ImageSums) else write_sums(found))


def facts(
    config: ConfigArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SUMS...", help="What `fedppd data sums` printed at each client; none: ask by Ray."),
    ] = None,
    address: AddressOption = None,
) -> None:
    """Print data.table or data.folder, complete, from clients' sums; without files, clients.*.data are asked for."""
    import yaml

    from fedppd_ray.data.own import section_from
    from fedppd_ray.data.sums_file import read_any_sums

    values = _values(config)
    data = _data(values)
    parts: dict[str, Any] = {str(file): read_any_sums(file, data) for file in files or ()}
    if not parts:
        from fedppd_ray.runtime.table_sums import ask_clients

        parts = ask_clients(_clients(values), data, address)
    section = _plain(section_from(parts, data))
    print(yaml.safe_dump({"data": {data["name"]: section}}, sort_keys=False, allow_unicode=True), end="")


def clear() -> None:
    """Delete what was parsed of any data on this machine, and the names of files that could not be read."""
    from fedppd_ray.data.cache import cache_root
    from fedppd_ray.data.cache import clear as clear_cache

    print(f"{clear_cache() / 1e6:.1f} MB deleted in {cache_root()}; downloads stay")


def _values(config: Path) -> dict[str, Any]:
    import yaml

    from fedppd_ray.config.file import find_config

    try:
        values = yaml.safe_load(find_config(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{config}: cannot be read ({' '.join(str(error).split())})") from None
    return values if isinstance(values, dict) else {}


def _data(values: dict[str, Any]) -> dict[str, Any]:
    """What the user said of the data, without facts that an earlier look may have left there."""
    data = {"name": "table", **(values.get("data") or {})}
    if data["name"] not in ("table", "folder"):
        raise ConfigError(f"data.name: {data['name']} is known already; facts are of a table or a folder")
    given = data.get("table") or {}
    return {
        **data,
        "table": {key: value for key, value in given.items() if key not in ("classes", "columns", "clients")},
    }


def _plain(section: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}


def _clients(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {name: own for name, own in (values.get("clients") or {}).items() if (own or {}).get("data")}
    if not found:
        raise ConfigError(
            "clients: none has data of its own; name each one's file, as client-00: {data: /data/rows.csv}, or give "
            "what `fedppd data sums` printed at each client"
        )
    return found
