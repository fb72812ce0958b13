"""Facts of rows that lie on other nodes: each node adds up its own and answers with the sums."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from fedppd_ray.data.own import sums_at
from fedppd_ray.errors import DataError, ResourceError
from fedppd_ray.runtime.driver import connect
from fedppd_ray.runtime.hosts import reason


def ask_clients(
    clients: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any], address: str | None, limit: float = 120
) -> dict[str, Any]:
    """Client → its sums, in the order of their names.

    `clients`: name → its section, with `data` and perhaps `label_selector`; `data`: the run's section of this name.
    """
    connect(address)
    try:
        return sums_on_nodes(clients, data, limit)
    finally:
        ray.shutdown()


def sums_on_nodes(
    clients: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any], limit: float = 120
) -> dict[str, Any]:
    """The same, of a Ray that is connected."""
    adding = ray.remote(sums_at)
    asked = {}
    for client, section in sorted(clients.items()):
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
        if section.get("label_selector"):
            options["label_selector"] = dict(section["label_selector"])
        asked[client] = adding.options(**options).remote(str(section["data"]), dict(data))
    answers = {}
    for client, reference in asked.items():
        try:
            answers[client] = ray.get(reference, timeout=limit)
        except GetTimeoutError:
            raise ResourceError(f"{client}: no node with its labels answered within {limit:g} s") from None
        except RayError as error:
            raise DataError(f"{client}: {reason(error).removeprefix('DataError: ')}") from None
    return answers
