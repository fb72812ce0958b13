"""Results of a comparison as one long table: a row per method, seed and metric, as pandas and R like it."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from fedppd_ray.studies.compared import Comparison

_HEAD = ("method", "seed", "metric", "value")
# Lists in the figures whose members name themselves: the key that does.
_NAMED = ("class", "client", "site")


def tidy(comparison: Comparison) -> str:
    """CSV of every number that is known of the finished runs; nested figures have dotted names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    for outcome in comparison.outcomes:
        if outcome.status != "finished":
            continue
        for metric, value in numbers(outcome.figures):
            writer.writerow((outcome.label, outcome.seed, metric, value))
        for metric in ("seconds", "megabytes"):
            writer.writerow((outcome.label, outcome.seed, metric, outcome.value(metric)))
    return text.getvalue()


def numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Dotted name → number, of all that is nested in there; per_class.recall of a class is per_class.<class>.recall."""
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from numbers(value, f"{name}.")
        elif isinstance(value, list):
            for entry in value:
                who = next((key for key in _NAMED if isinstance(entry, Mapping) and key in entry), None)
                if who is not None:
                    yield from numbers(entry, f"{prefix}{entry[who]}.")
