"""[1] A configuration for one method: of values that were meant for several, or that an earlier version stored."""

from collections.abc import Mapping
from typing import Any

from fedppd_ray.config.messages import methods_reading
from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import config_class, remove_key


def restricted(values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Without what other methods read and this one does not; a pool that it has no use for becomes reserved rows."""
    kept = _known(values, config_class(method), ())
    for key in METHODS[method].unused(kept):
        remove_key(kept, key)
    data = kept.get("data")
    pool = data.get("server_pool") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(pool, int) and pool and not METHODS[method].needs_pool(kept):
        kept["data"] = {**data, "server_pool": 0, "reserved": max(pool, data.get("reserved") or 0)}
    return kept


def _known(values: Mapping[str, Any], section: Any, path: tuple[str, ...]) -> dict[str, Any]:
    fields = getattr(section, "model_fields", None)
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if fields is not None and key not in fields:
            if methods_reading((*path, key)):
                continue  # another method's
            kept[key] = value  # nobody's: for the validation to refuse
        elif isinstance(value, dict) and fields is not None:
            kept[key] = _known(value, fields[key].annotation, (*path, key))
        else:
            kept[key] = value
    return kept


def upgraded(values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """What version 0.1 wrote: every section of every method, and a baseline whose rates were the teacher's."""
    values = dict(values)
    baseline, teacher = values.get("baseline"), values.get("teacher")
    if isinstance(baseline, dict) and isinstance(teacher, dict) and "rate_step" not in baseline:
        own = baseline.get("rate")
        values["baseline"] = {
            **baseline,
            "rate": teacher["rate"] / 2 if own is None else own,
            "rate_step": teacher["rate_step"],
            "rate_gamma": teacher["rate_gamma"],
        }
    return restricted(values, method)
