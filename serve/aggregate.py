"""Metrics of all replicas at once: each writes its numbers into a folder, and whoever is asked adds them up.

Counters and histograms of a replica that is gone still count, so that no sum ever falls; its gauges do not.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.metrics import Metrics

logger = logging.getLogger("fedppd.serve")

WRITE_SECONDS = 1.0
# A replica that has not written for so long is gone; a busy machine may keep one from it for seconds.
_GONE_SECONDS = 15.0
# Of a gauge the worst replica's value tells, but for these.
_GAUGES: dict[str, Callable[[Iterable[float]], float]] = {"fedppd_pending_requests": sum, "fedppd_model_round": min}

Sample = tuple[str, tuple[tuple[str, str], ...]]


class AllReplicas(Collector):
    """The metrics of this replica and of those that write into the same folder."""

    def __init__(self, metrics: Metrics, folder: str) -> None:
        self._metrics = metrics
        self._folder = Path(folder)
        self._own = self._folder / f"{uuid4().hex}.json"
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def write(self) -> None:
        """To be called every `WRITE_SECONDS`. Appears whole; a reader never sees half of it."""
        fresh = self._own.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(list(map(_as_json, self._metrics.collect()))), encoding="utf-8")
            os.replace(fresh, self._own)
        except OSError as error:
            logger.warning("the metrics of this replica are not shared (%s)", error)

    def text(self) -> bytes:
        """Prometheus' exposition format. Reads files: not for the event loop."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        own = list(map(_as_json, self._metrics.collect()))
        others, alive = self._others()
        yield from (_sum([family, *_same(family, others)]) for family in own)
        yield GaugeMetricFamily("fedppd_replicas", "Replicas whose metrics these are.", value=1 + alive)

    def _others(self) -> tuple[list[dict[str, Any]], int]:
        """What all other replicas wrote last, and how many of them are alive."""
        families: list[dict[str, Any]] = []
        alive = 0
        for path in sorted(self._folder.glob("*.json")):
            if path == self._own:
                continue
            try:
                gone = time.time() - path.stat().st_mtime > _GONE_SECONDS
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                logger.warning("%s: metrics cannot be read (%s)", path.name, error)
                continue
            alive += not gone
            families += [family for family in found if not gone or family["type"] != "gauge"]
        return families, alive


def _as_json(family: Metric) -> dict[str, Any]:
    samples = [[sample.name, sorted(sample.labels.items()), sample.value] for sample in family.samples]
    return {"name": family.name, "type": family.type, "text": family.documentation, "samples": samples}


def _same(family: dict[str, Any], others: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [other for other in others if (other["name"], other["type"]) == (family["name"], family["type"])]


def _sum(families: list[dict[str, Any]]) -> Metric:
    first = families[0]
    combine = _GAUGES.get(first["name"], max) if first["type"] == "gauge" else sum
    values: dict[Sample, list[float]] = {}
    for family in families:
        for name, labels, value in family["samples"]:
            values.setdefault((name, tuple((key, text) for key, text in labels)), []).append(value)
    total = Metric(first["name"], first["text"], first["type"])
    for (name, pairs), found in values.items():
        total.add_sample(name, dict(pairs), combine(found))
    return total
