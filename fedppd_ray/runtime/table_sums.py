"""Facts of tables that lie on other nodes: each node adds up its own file and answers with the sums."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fedppd_ray.data.sums_file import sums_of_file
from fedppd_ray.data.table import Sums
from fedppd_ray.errors import DataError, ResourceError
from fedppd_ray.runtime.driver import connect
from fedppd_ray.runtime.hosts import reason


def ask_clients(
    clients: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], address: str | None, limit: float = 120
) -> list[Sums]:
    """`clients`: id → its section, with `data` and perhaps `label_selector`. In the order of their ids."""
    connect(address)
    try:
        return sums_on_nodes(clients, given, limit)
    finally:
        ray.shutdown()


def sums_on_nodes(clients: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], limit: float = 120) -> list[Sums]:
    """The same, of a Ray that is connected."""
    adding = ray.remote(_add_up)
    asked = {}
    for client, section in sorted(clients.items()):
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
        if section.get("label_selector"):
            options["label_selector"] = dict(section["label_selector"])
        asked[client] = adding.options(**options).remote(str(section["data"]), dict(given))
    answers = []
    for client, reference in asked.items():
        try:
            answers.append(ray.get(reference, timeout=limit))
        except GetTimeoutError:
            raise ResourceError(f"{client}: no node with its labels answered within {limit:g} s") from None
        except RayError as error:
            raise DataError(f"{client}: {reason(error).removeprefix('DataError: ')}") from None
    return answers


def _add_up(path: str, given: Mapping[str, Any]) -> Sums:
    return sums_of_file(Path(path), given)
