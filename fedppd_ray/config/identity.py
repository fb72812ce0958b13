"""Which settings make two runs the same run: what `--resume` compares."""

import hashlib
import json
from collections.abc import Mapping

from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import Config

# Changing these does not change what an earlier round computed, so a resumed run may change them; but see `bound_by`.
FREE_ON_RESUME = (
    *("name", "federation.rounds", "federation.quorum", "federation.deadline_s", "federation.retries"),
    *("federation.share_class_counts", "resources", "checkpoint", "evaluation", "data.root"),
)


def bound_by(config: Config) -> list[str]:
    """The keys, such as a cosine over the rounds, that make every round depend on `federation.rounds`."""
    found: list[str] = METHODS[config.method].by_rounds(config)
    return found


def flatten(config: Config) -> dict[str, object]:
    """Dotted key → value, in a fixed order."""
    flat: dict[str, object] = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else key, value)
        else:
            flat[prefix] = node

    walk("", config.values())
    return flat


def binding(config: Config) -> dict[str, object]:
    """The keys that a resumed run must share."""
    free = [key for key in FREE_ON_RESUME if key != "federation.rounds" or not bound_by(config)]
    return {
        key: value
        for key, value in flatten(config).items()
        if not any(key == name or key.startswith(name + ".") for name in free)
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


def conflicts(before: Config, after: Config) -> list[str]:
    """Why a run that was begun with one configuration cannot be continued with another; nothing where it can."""
    lines = difference(binding(before), binding(after))
    keys = ", ".join(dict.fromkeys((*bound_by(before), *bound_by(after))))
    return [f"{line}, on which {keys} depends" if line.startswith("federation.rounds:") else line for line in lines]
