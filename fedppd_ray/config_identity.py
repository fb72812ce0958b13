"""Which settings make two runs the same run: what `--resume` compares."""

import hashlib
import json
from collections.abc import Mapping

from fedppd_ray.config import Config

# Changing these does not change what an earlier round computed, so a resumed run may change them.
FREE_ON_RESUME = ("name", "federation.rounds", "resources", "checkpoint", "evaluation", "data.root")


def flatten(config: Config) -> dict[str, object]:
    """Dotted key → value, in a fixed order."""
    flat: dict[str, object] = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else key, value)
        else:
            flat[prefix] = node

    walk("", config.model_dump(mode="json"))
    return flat


def binding(config: Config) -> dict[str, object]:
    """The keys that a resumed run must share."""
    return {
        key: value
        for key, value in flatten(config).items()
        if not any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)
        # Where a client runs is free, what it learns from is not.
        and not (key.startswith("clients.") and not key.endswith(".data"))
    }


def config_hash(config: Config) -> str:
    text = json.dumps(binding(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def difference(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Readable lines `key: before -> after`."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]
