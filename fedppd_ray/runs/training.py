"""A training run, whichever executor does the work: rounds, evaluation, checkpoints, export.

The loop in `run_rounds` is all there is: every round is accepted, recorded and saved before the next begins.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fedppd_ray.config.nouns import FOLDER
from fedppd_ray.config.schema import Config
from fedppd_ray.config.table import TABLE
from fedppd_ray.errors import FedPPDError, ServerLostError
from fedppd_ray.evaluation.by_clients import with_sets
from fedppd_ray.evaluation.calibration import Calibration, calibrate, needs_network
from fedppd_ray.evaluation.federated import calibrate_by_asking
from fedppd_ray.evaluation.metrics import Metrics, metrics_of
from fedppd_ray.evaluation.own_rows import as_sites, question_for
from fedppd_ray.federation.concerns import concerns
from fedppd_ray.federation.executor import Executor
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.round import federated_round, select_clients
from fedppd_ray.federation.types import ClientInfo, GlobalState, RoundReport
from fedppd_ray.inference.abstention import never_abstains
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import NetworkPredictor, Predictor, network_predictor
from fedppd_ray.inference.scores import Floats, Outputs
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import Method
from fedppd_ray.runs.clock import now
from fedppd_ray.runs.export import export_student
from fedppd_ray.runs.store import RunStore
from fedppd_ray.workers.asked import TEACHER

log = logging.getLogger("fedppd")
_SERVER_RESTARTS = 3


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
    _clients: Sequence[ClientInfo] = field(init=False, default=())
    _warned: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        # For labels of held-out rows and for the export; the networks cost a few megabytes.
        self._method = build_method(self.config)
        self._held_out = HeldOut(self.config)

    def run_rounds(self, start: GlobalState | None) -> None:
        """Every round after `start` (None: from the initialisation)."""
        config, federation, server = self.config, self.config.federation, self.executor.server
        clients = config.client_names
        server.install(start)
        first = start.round + 1 if start else 1
        described = self.executor.clients.describe()
        self.store.save_clients(described)
        self._clients = described
        self._say_concerns(described)
        self.observer.run_started(config, first, described)
        state = server.state()
        for round_id in range(first, federation.rounds + 1):
            began = self.clock()
            selected = select_clients(clients, federation.participation, config.seed, round_id)
            self.observer.round_started(round_id, selected)
            report = self._round(round_id, selected, state)
            before, state = state, server.state()
            scores, more = self._evaluate(round_id), {}
            if scores is not None:
                # Before the checkpoint: a crash in between repeats the round, whereas a checkpoint of the last
                # round without its student would never be exported.
                more = {**self._export(state, scores), **self._ask_teacher(state)}
            record = {**_record(report, scores, self.clock() - began, self._bytes(before)), **more}
            self.store.save(state, config, record)
            self.observer.round_finished(record)

    def _say_concerns(self, described: Sequence[ClientInfo]) -> None:
        """Of data that users bring; the others are known, and dealt as they are on purpose."""
        info = self.config.dataset
        if info.name in (FOLDER, TABLE):
            in_test = np.bincount(self._held_out.labels("test"), minlength=len(info.classes)).tolist()
            for concern in concerns(info.classes, described, in_test):
                log.warning(concern)

    def _round(self, round_id: int, selected: Sequence[str], state: GlobalState) -> RoundReport:
        """A round; if the server dies, the same round again from the state before it: the same bits."""
        policy = FailurePolicy(self.config.federation.retries, self.config.federation.quorum)
        for _ in range(_SERVER_RESTARTS):
            try:
                return federated_round(self.executor, round_id, selected, policy, self.observer)
            except ServerLostError as error:
                self.observer.server_lost(round_id, str(error))
                self.executor.server.install(state)
        return federated_round(self.executor, round_id, selected, policy, self.observer)

    def _evaluate(self, round_id: int) -> Metrics | None:
        if round_id % self.config.evaluation.every and round_id != self.config.federation.rounds:
            return None
        return metrics_of(self._predict("test", round_id), self._held_out.labels("test"))

    def _predict(self, split: str, round_id: int, own: Predictor | None = None) -> Floats:
        """As the method predicts, or as `own` does."""
        if own:
            return self._finite(self._held_out.log_probabilities(own, split), split, round_id)
        return self._finite(self.executor.evaluation.predict(split), split, round_id)

    def _finite(self, log_probabilities: Floats, split: str, round_id: int) -> Floats:
        if not np.isfinite(log_probabilities).all():
            raise FedPPDError(
                f"round {round_id}: the student's predictions on the {split} rows are not finite: its weights have "
                f"diverged; lower {self._method.rates(self.config)} and start again"
            )
        return log_probabilities

    def _bytes(self, before: GlobalState) -> tuple[int, int]:
        """Of weights, down to a client and up from it, in the round after `before`."""
        numbers = sum(self._method.update_sizes(before).values())
        return sum(vector.nbytes for vector in before.models.values()), numbers * np.dtype(np.float32).itemsize

    def _export(self, state: GlobalState, scores: Metrics) -> dict[str, float]:
        """The network to serve, with the figures, temperature and threshold of that very network.

        Returns what the round's record has of it.
        """
        student = self._method.student(state.models)
        network = network_predictor(student)
        own = None if self._method.one_network else network
        calibration = self._calibrate(state, network)
        more = {} if calibration.nll is None else {"calibration_nll": calibration.nll}
        if self.config.evaluation.export == "best" and not self._improves(calibration.nll):
            return more
        if own:
            scores = metrics_of(self._predict("test", state.round, own), self._held_out.labels("test"))
        card = export_student(
            self.store.folder,
            self.config,
            state.round,
            student,
            scores.as_dict(),
            calibration.abstention,
            calibration.entry(),
        )
        if (warning := never_abstains(card)) and not self._warned:
            log.warning(warning)
            self._warned = True
        self._ask_clients(state, card)
        self.observer.exported(state.round, card)
        return more

    def _ask_clients(self, state: GlobalState, card: Mapping[str, Any]) -> None:
        """How the student does at each client that keeps rows back: kept beside the export."""
        kept = any(section.held_out for section in self.config.clients.values())
        if not (kept or self.config.data.kept_by_clients):
            return
        if found := as_sites(self.executor.clients.ask(question_for(card), state)):
            self.store.save_client_figures(state.round, found)

    @property
    def _classes(self) -> int:
        return len(self.config.dataset.classes)

    def _calibrate(self, state: GlobalState, network: NetworkPredictor) -> Calibration:
        """By the method's own predictions, which are the network's; here, where a score needs more than these.

        Where clients keep rows back, by asking them.
        """
        round_id = state.round
        if self.config.data.kept_by_clients:
            ask, evaluation = partial(self.executor.clients.ask, state=state), self.config.evaluation
            found = calibrate_by_asking(evaluation, ask, self._classes)
            return with_sets(found, evaluation, self.config.dataset.classes, ask)
        labels = self._held_out.labels("calibration")
        if not len(labels):
            known = Outputs(np.empty((0, self._classes)))
        elif self._method.one_network and not needs_network(self.config.evaluation):
            known = Outputs(self._predict("calibration", round_id))
        else:
            known = self._held_out.outputs(network, "calibration")
            self._finite(known.log_probabilities, "calibration", round_id)
        return calibrate(
            self.config.evaluation,
            known,
            labels,
            lambda: self._held_out.outputs(network, "outliers"),
            self.config.dataset.classes,
            self._clients,
        )

    def _improves(self, nll: float | None) -> bool:
        """Whether no earlier round has a lower NLL on the calibration rows."""
        earlier = [line["calibration_nll"] for line in self.store.history() if "calibration_nll" in line]
        return nll is None or nll < min(earlier, default=math.inf)

    def _ask_teacher(self, state: GlobalState) -> dict[str, float]:
        if self._method.teacher(state.models) is None:
            return {}
        seen = self.executor.evaluation.predict(f"{TEACHER}test")
        return {"teacher_accuracy": 100 * float((seen.argmax(axis=1) == self._held_out.labels("test")).mean())}


def _record(report: RoundReport, scores: Metrics | None, seconds: float, traffic: tuple[int, int]) -> dict[str, Any]:
    """The round's line of metrics.jsonl. Metrics are null in rounds without evaluation.

    `traffic`: the bytes of weights that a client is sent and sends.
    """
    metrics = scores.as_dict() if scores else dict.fromkeys(Metrics.__dataclass_fields__)
    down, up = traffic
    delivered, failed = len(report.accepted), len(report.failures)
    return {
        "round": report.round,
        "time": now(),
        **metrics,
        "seconds": round(seconds, 3),
        "clients": delivered,
        "failed": failed,
        "failures": [{"client": failure.client, "reason": failure.reason} for failure in report.failures],
        "rows": sum(receipt.rows for receipt in report.accepted),
        # Down to every client that took part, up from every client that delivered.
        "megabytes": round((down * (delivered + failed) + up * delivered) / 1e6, 3),
    }
