"""The kinds of data that users bring: importing this module registers them.

Where each client has rows in a place of its own, facts come from sums that are made at each place.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedppd_ray.config.nouns import FOLDER, OWN_DATA, OwnData
from fedppd_ray.config.table import TABLE
from fedppd_ray.data.cache import data_root
from fedppd_ray.data.folder import client_folders, facts_file, folder_facts
from fedppd_ray.data.image_sums import ImageSums, folder_section, image_sums
from fedppd_ray.data.readers.images import class_names
from fedppd_ray.data.sums_file import sums_of_file
from fedppd_ray.data.table import Sums, checked_options, facts_of, incomplete, table_clients, table_facts
from fedppd_ray.errors import DataError


def sums_at(place: str, data: Mapping[str, Any]) -> ImageSums | Sums:
    """What leaves a client of its rows, so that the facts of all can be put together; made where the rows are."""
    path = Path(place).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    return sums_of_file(path, data[TABLE]) if data["name"] == TABLE else image_sums(path, data)


def section_from(parts: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data.table` or `data.folder`, complete, from the clients' sums."""
    if data["name"] == TABLE:
        return facts_of(list(parts.values()), checked_options(data.get(TABLE) or {}), "the clients")
    return folder_section(parts, data.get(FOLDER) or {})


def _from_clients(places: Mapping[str, str], root: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    if data["name"] == TABLE:
        checked_options(data.get(TABLE) or {})
    else:
        data = {**data, FOLDER: {**facts_file(root), **(data.get(FOLDER) or {})}}
    section = section_from({client: _here(client, place, data) for client, place in sorted(places.items())}, data)
    if data["name"] == FOLDER and "classes" not in data[FOLDER]:  # some may be in the test rows alone
        section["classes"] = sorted({*section["classes"], *class_names(root / "test")})
    return section


def _here(client: str, place: str, data: Mapping[str, Any]) -> Any:
    try:
        return sums_at(place, data)
    except DataError as error:
        if Path(place).expanduser().exists():
            raise DataError(f"clients.{client}.data: {error}") from None
        raise DataError(
            f"clients.{client}.data: {place} is not on this machine; if it is on the client's own, `fedppd data facts "
            f"CONFIG` asks there, and prints what is to be put into the configuration"
        ) from None


def _kind(
    describe: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]],
    clients: Callable[[Path], list[str]],
    left: Callable[[Mapping[str, Any]], bool] = lambda _given: False,
) -> OwnData:
    return OwnData(data_root, describe, clients, _from_clients, left)


OWN_DATA.register(FOLDER, _kind(folder_facts, client_folders), __name__)
OWN_DATA.register(TABLE, _kind(table_facts, table_clients, incomplete), __name__)
