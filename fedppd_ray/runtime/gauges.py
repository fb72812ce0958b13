"""The run on Ray's Prometheus port: `ray_fedppd_*`, each with the tag `run`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.metrics import Gauge

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import ClientInfo, Failure, Receipt

# Name → what it tells. The dashboard in k8s/ shows these.
GAUGES = {
    "fedppd_round": "last finished round",
    "fedppd_rounds": "rounds of the run",
    "fedppd_accuracy": "accuracy on held-out data, percent",
    "fedppd_ece": "expected calibration error, percent",
    "fedppd_nll": "negative log likelihood, nats",
    "fedppd_clients_done": "clients that delivered in the current round",
    "fedppd_clients_failed": "failed attempts of clients in the current round",
    "fedppd_clients_dropped": "clients dropped in the current round",
    "fedppd_round_seconds": "duration of the last finished round",
    "fedppd_megabytes_sent": "weights sent in the last finished round",
}


class GaugeObserver(Observer):
    """Made after `ray.init`."""

    def __init__(self) -> None:
        self._gauges = {name: Gauge(name, description=text, tag_keys=("run",)) for name, text in GAUGES.items()}
        self._counts: dict[str, int] = {}

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": config.name})
        self._set("rounds", config.federation.rounds)
        self._set("round", first_round - 1)

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        for name in ("clients_done", "clients_failed", "clients_dropped"):
            self._counts[name] = 0
            self._set(name, 0)

    def client_done(self, receipt: Receipt) -> None:
        self._count("clients_done")

    def client_failed(self, failure: Failure, action: Action) -> None:
        self._count("clients_failed")
        if action is Action.DROP:
            self._count("clients_dropped")

    def server_lost(self, round_id: int, reason: str) -> None:
        self.round_started(round_id, ())

    def round_finished(self, record: Mapping[str, Any]) -> None:
        self._set("round", record["round"])
        self._set("round_seconds", record["seconds"])
        self._set("megabytes_sent", record["megabytes"])
        for name in ("accuracy", "ece", "nll"):
            if record[name] is not None:
                self._set(name, record[name])

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        self._set(name, self._counts[name])

    def _set(self, name: str, value: float) -> None:
        self._gauges[f"fedppd_{name}"].set(value)
