"""A training run, whichever executor does the work: rounds, evaluation, checkpoints, export.

The loop in `run_rounds` is all there is: every round is accepted, recorded and saved before the next begins.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedppd_ray.checkpoint.export import export_student
from fedppd_ray.checkpoint.store import RunStore
from fedppd_ray.config import Config, client_ids
from fedppd_ray.core.executor import Executor
from fedppd_ray.core.failure_policy import Action, FailurePolicy
from fedppd_ray.core.federated_round import federated_round, select_clients
from fedppd_ray.core.types import ClientInfo, Failure, GlobalState, Receipt, RoundReport
from fedppd_ray.errors import FedPPDError, ServerLostError
from fedppd_ray.evaluation.abstention import abstention_card
from fedppd_ray.evaluation.metrics import Floats, Scores, score
from fedppd_ray.evaluation.predictive import HeldOut, Predictor, network_predictor
from fedppd_ray.evaluation.report import save_clients
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import Method

_SERVER_RESTARTS = 3


class Observer(Protocol):
    """Who watches a run: the terminal display, the log."""

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None: ...
    def round_started(self, round_id: int, selected: Sequence[str]) -> None: ...
    def client_done(self, receipt: Receipt) -> None: ...
    def client_failed(self, failure: Failure, action: Action) -> None: ...
    def server_lost(self, round_id: int, reason: str) -> None: ...
    def round_finished(self, record: dict[str, Any]) -> None: ...


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        for observer in self._observers:
            observer.run_started(config, first_round, clients)

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        for observer in self._observers:
            observer.round_started(round_id, selected)

    def client_done(self, receipt: Receipt) -> None:
        for observer in self._observers:
            observer.client_done(receipt)

    def client_failed(self, failure: Failure, action: Action) -> None:
        for observer in self._observers:
            observer.client_failed(failure, action)

    def server_lost(self, round_id: int, reason: str) -> None:
        for observer in self._observers:
            observer.server_lost(round_id, reason)

    def round_finished(self, record: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.round_finished(record)


@dataclass
class Training:
    """One run from its first (or resumed) round to its last."""

    config: Config
    store: RunStore
    executor: Executor
    observer: Observer
    clock: Callable[[], float] = time.monotonic
    _method: Method = field(init=False)
    _held_out: HeldOut = field(init=False)

    def __post_init__(self) -> None:
        # For labels of held-out rows and for the export; the networks cost a few megabytes.
        self._method = build_method(self.config)
        self._held_out = HeldOut(self.config)

    def run_rounds(self, start: GlobalState | None) -> None:
        """Every round after `start` (None: from the initialisation)."""
        config, federation = self.config, self.config.federation
        clients = client_ids(federation.clients)
        self.executor.install(start)
        first = start.round + 1 if start else 1
        described = self.executor.describe()
        save_clients(self.store.folder, described)
        self.observer.run_started(config, first, described)
        state = self.executor.state()
        for round_id in range(first, federation.rounds + 1):
            began = self.clock()
            selected = select_clients(clients, federation.participation, config.seed, round_id)
            self.observer.round_started(round_id, selected)
            report = self._round(round_id, selected, state)
            before, state = state, self.executor.state()
            scores = self._evaluate(round_id)
            if scores is not None:
                # Before the checkpoint: a crash in between repeats the round, whereas a checkpoint of the last
                # round without its student would never be exported.
                self._export(state, scores)
            record = _record(report, scores, self.clock() - began, before, state)
            self.store.save(state, config, record)
            self.observer.round_finished(record)

    def _round(self, round_id: int, selected: Sequence[str], state: GlobalState) -> RoundReport:
        """A round; if the server dies, the same round again from the state before it: the same bits."""
        policy = FailurePolicy(self.config.federation.retries, self.config.federation.quorum)
        for _ in range(_SERVER_RESTARTS):
            try:
                return federated_round(self.executor, round_id, selected, policy, self.observer)
            except ServerLostError as error:
                self.observer.server_lost(round_id, str(error))
                self.executor.install(state)
        return federated_round(self.executor, round_id, selected, policy, self.observer)

    def _evaluate(self, round_id: int) -> Scores | None:
        if round_id % self.config.evaluation.every and round_id != self.config.federation.rounds:
            return None
        return score(self._predict("test", round_id), self._held_out.labels("test"))

    def _predict(self, split: str, round_id: int, own: Predictor | None = None) -> Floats:
        """As the method predicts, or as `own` does."""
        log_probabilities = self._held_out.log_probabilities(own, split) if own else self.executor.predict(split)
        if not np.isfinite(log_probabilities).all():
            raise FedPPDError(
                f"round {round_id}: the student's predictions on the {split} rows are not finite: its weights have "
                f"diverged; lower {self._rate_key} (or the rates of server.distill) and start again"
            )
        return log_probabilities

    @property
    def _rate_key(self) -> str:
        return "student.rate" if self.config.method == "fedppd" else "baseline.rate"

    def _export(self, state: GlobalState, scores: Scores) -> None:
        """The network to serve, with the figures and the threshold of that very network."""
        student = self._method.student(state.models)
        own = None if self._method.one_network else network_predictor(student)
        if own:
            scores = score(self._predict("test", state.round, own), self._held_out.labels("test"))
        abstention = None
        if self.config.data.calibration:
            abstention = abstention_card(
                self._predict("calibration", state.round, own),
                self._held_out.labels("calibration"),
                self.config.evaluation.coverage,
            )
        export_student(self.store.folder, self.config, state.round, student, scores.as_dict(), abstention)


def _record(
    report: RoundReport, scores: Scores | None, seconds: float, before: GlobalState, after: GlobalState
) -> dict[str, Any]:
    """The round's line of metrics.jsonl. Metrics are null in rounds without evaluation."""
    metrics = scores.as_dict() if scores else dict.fromkeys(Scores.__dataclass_fields__)
    down, up = (sum(vector.nbytes for vector in state.models.values()) for state in (before, after))
    delivered, failed = len(report.accepted), len(report.failures)
    return {
        "round": report.round,
        **metrics,
        "seconds": round(seconds, 3),
        "clients": delivered,
        "failed": failed,
        "failures": [{"client": failure.client, "reason": failure.reason} for failure in report.failures],
        "rows": sum(receipt.rows for receipt in report.accepted),
        # Down to every client that took part, up from every client that delivered.
        "megabytes": round((down * (delivered + failed) + up * delivered) / 1e6, 3),
    }
