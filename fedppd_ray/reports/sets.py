"""Prediction sets and the OOD flag, as people read them."""

from collections.abc import Mapping
from typing import Any

_MOST_NAMED = 12


def set_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) pairs: coverage and mean size at each confidence, by class and by client."""
    found = figures.get("sets")
    if not found:
        return []
    rows = [
        (f"sets at {100 * line['confidence']:g} % ({found['method']}), coverage / mean size", _pair(line))
        for line in found["table"]
    ]
    sure = f"{100 * found['confidence']:g} %"
    for key, name in (("classes", "class"), ("sites", "client")):
        if key in found:
            rows.append((f"sets at {sure} by {name} (not promised)", _listed(found[key])))
    return rows


def flag_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = figures.get("ood_flag")
    if not found:
        return []
    shown = f"{found['false_alarms_wanted']:g} / {found['false_alarms']:.1f} %"
    rows = [(f"flagged as OOD by {found['score'].replace('_', ' ')}, wanted / test rows", shown)]
    return rows + [(f"flagged of {name}", f"{share:.1f} %") for name, share in found["flagged"].items()]


def _pair(line: Mapping[str, float]) -> str:
    return f"{line['coverage']:.1f} % / {line['size']:.2f}"


def _listed(groups: Mapping[str, Mapping[str, float]]) -> str:
    """All, or of many the least covered."""
    ordered = list(groups.items())
    if len(ordered) > _MOST_NAMED:
        ordered = sorted(ordered, key=lambda pair: pair[1]["coverage"])[:_MOST_NAMED]
    listed = ", ".join(f"{name} {_pair(line)}" for name, line in ordered)
    return listed + (", … (the least covered)" if len(ordered) < len(groups) else "")
