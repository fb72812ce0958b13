"""Prometheus metrics of one replica.

Histograms count whole arrays at once: a batch of 4,096 images adds 4,096 entropies in one call. Everything is
recorded under one lock and read only by `collect`.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_NATS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.6)


class _Family(Protocol):
    def metric(self) -> Metric: ...


class Counter:
    """A counter with one value for each combination of labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def inc(self, *labels: str, by: float = 1) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + by

    def totals(self, wanted: Callable[[tuple[str, ...]], bool]) -> dict[tuple[str, ...], float]:
        with self._lock:
            return {labels: value for labels, value in self._values.items() if wanted(labels)}

    def metric(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        with self._lock:
            for labels, value in self._values.items():
                family.add_metric(labels, value)
        return family


class Gauge:
    """A gauge."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def metric(self) -> Metric:
        return GaugeMetricFamily(self._name, self._text, value=self.value)


class Histogram:
    """A histogram that takes one value, or an array of them at once."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        # Prometheus' buckets include their upper bound.
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def observe_all(self, values: ArrayLike) -> None:
        array = np.atleast_1d(np.asarray(values, np.float64))
        places = np.bincount(np.searchsorted(self._bounds, array, side="left"), minlength=len(self._counts))
        with self._lock:
            self._counts += places
            self._sum += float(array.sum())

    def totals(self) -> tuple[int, float]:
        """How many values, and their sum."""
        with self._lock:
            return int(self._counts.sum()), self._sum

    def metric(self) -> Metric:
        with self._lock:
            running, total = np.cumsum(self._counts).tolist(), self._sum
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets=list(zip(names, running, strict=True)), sum_value=total)
        return family


class Metrics(Collector):
    def __init__(self) -> None:
        self.requests = Counter("fedppd_requests", "Requests by route and status.", ["route", "status"])
        self.request_seconds = Histogram(
            "fedppd_request_seconds", "Time to answer a prediction request, in the replica.", _LATENCY
        )
        self.batch_rows = Histogram("fedppd_batch_rows", "Images that shared one forward pass.", _ROWS)
        self.entropy = Histogram("fedppd_entropy_nats", "Predictive entropy of the images.", _NATS)
        self.predictions = Counter("fedppd_predictions", "Images predicted, by whether it abstained.", ["abstain"])
        self.reloads = Counter("fedppd_reloads", "New exports, by what became of them.", ["result"])
        self.reload_failing = Gauge("fedppd_reload_failing", "1 while the newest export is refused.")
        self.model_round = Gauge("fedppd_model_round", "Training round of the current student.")
        self.decoders_lost = Counter("fedppd_decoders_lost", "Decoders ended by the body they decoded.", [])
        self.token_requests = Counter("fedppd_token_requests", "Requests by the name of their token.", ["token"])
        self.pending = Gauge("fedppd_pending_requests", "Prediction requests in the replica.")
        self.last_inference = 0  # milliseconds of the epoch, as Triton's statistics have it
        self._families: tuple[_Family, ...] = (
            self.requests,
            self.request_seconds,
            self.batch_rows,
            self.entropy,
            self.predictions,
            self.reloads,
            self.reload_failing,
            self.model_round,
            self.decoders_lost,
            self.token_requests,
            self.pending,
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, *families: _Family) -> None:
        """Of a part of the service that not every replica has."""
        self._families += families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield family.metric()

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        return generate_latest(self._registry)
