"""What a client's own node says of its rows before the first round: errors for none, a warning for odd ones."""

import logging
from collections.abc import Sequence

import numpy as np

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.data.parts import Labels
from fedppd_ray.errors import DataError

log = logging.getLogger(__name__)

_FEW = 10
_MOST_CLASSES = 20  # of which it is worth a line that one is lacking


def check_rows(client: str, labels: Labels, info: DatasetInfo) -> None:
    """DataError where there is nothing to train on; one warning for a site of few rows or few classes."""
    if len(labels) == 0:
        raise DataError(f"{client}: holds no row; give it some, or leave this client out (federation.clients)")
    if info.name in ("folder", "table"):
        found = oddities(labels, info.classes)
        if found:
            log.warning("%s: %s", client, "; ".join(found))


def oddities(labels: Labels, classes: Sequence[str]) -> list[str]:
    counts = np.bincount(labels, minlength=len(classes))
    found = []
    if len(labels) < _FEW:
        found.append(
            f"holds {len(labels)} rows only: its update and its counts say much about each of them; give it more, or "
            f"leave it out"
        )
    lacking = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if len(lacking) == len(classes) - 1:
        found.append(
            f"all of its rows are {classes[int(counts.argmax())]!r}: alone it would learn to answer nothing else; "
            f"client.label_shift makes up for such a site"
        )
    elif lacking and len(classes) <= _MOST_CLASSES:
        found.append(f"has no row of {', '.join(map(repr, lacking))}: what it learns of them is the others'")
    return found
