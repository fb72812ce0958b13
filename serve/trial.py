"""A candidate on trial beside the current student: in shadow (asked, never returned) or as a canary (returned to some).

Each replica looks at the registry's pointers, counts for itself, and decides by the candidate's live gates. The first
decision of any replica counts, because it moves the pointers.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedppd_ray.data.parts import RawRows
from fedppd_ray.errors import CheckpointError, FedPPDError
from fedppd_ray.releases.live import Decision, Tally, decide
from fedppd_ray.releases.promotion import Superseded, end_trial
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import Candidate
from fedppd_ray.runs.remote import Location
from serve.comparing import Comparing
from serve.metrics import Counter, Gauge, Metrics
from serve.student import ServedStudent

logger = logging.getLogger("fedppd.serve")

_HASHES = 2**64


@dataclass(frozen=True)
class Running:
    candidate: Candidate
    student: ServedStudent
    tally: Tally = field(default_factory=Tally)
    started: float = field(default_factory=time.monotonic)

    def takes(self, request: str) -> bool:
        """Whether this request is of the candidate's share: always the same answer for the same id."""
        salted = f"{self.candidate.version} {request}".encode()
        digest = hashlib.blake2b(salted, digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.candidate.share * _HASHES


class Trial:
    """`current` gives the student that is served; `promoted` is called when a candidate has become current."""

    def __init__(
        self,
        registry: Registry,
        current: Callable[[], ServedStudent],
        promoted: Callable[[], object],
        load: Callable[[Location], ServedStudent],
        budget: float,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._current = current
        self._promoted = promoted
        self._load = load
        self._running: Running | None = None
        self._refused: Candidate | None = None
        self._gauges = _Gauges(metrics)
        self._comparing = Comparing(self._pair, budget, self._gauges.dropped)

    def start(self) -> None:
        self._comparing.start()

    def stop(self) -> None:
        self._comparing.stop()

    # ---- on the event loop, for each request

    def canary_for(self, request: str) -> ServedStudent | None:
        """The candidate, where this request is to be answered by it."""
        running = self._running
        if running is None or running.candidate.mode != "canary" or running.tally.failures:
            return None
        if not running.takes(request):
            return None
        self._gauges.canary.inc()
        return running.student

    def offer(self, request: str, values: RawRows) -> None:
        """Rows that were answered, to be compared later, or never."""
        running = self._running
        if running is not None and running.takes(request):
            self._comparing.offer(values)

    def give_up(self, student: ServedStudent) -> None:
        """The candidate failed on a request: nobody else gets it."""
        running = self._running
        if running is not None and running.student is student:
            running.tally.fail()  # the watcher's thread does the rest: the registry may be far away

    # ---- in the watcher's thread

    def refresh(self) -> None:
        """Follow the registry's candidate, and decide about it where there is enough to decide on."""
        candidate, running = self._registry.state().candidate, self._running
        if running is not None and candidate != running.candidate:
            self._end(f"the trial of {running.candidate.version} is over")
        if candidate is not None and candidate != self._refused and self._running is None:
            self._begin(candidate)
        if (running := self._running) is not None:
            self._gauges.show(running.tally)
            self._conclude(running)

    def _begin(self, candidate: Candidate) -> None:
        try:
            student = self._load(self._registry.verified(candidate.version))
            why = unfit(self._current(), student)
        except (CheckpointError, OSError) as error:
            why = f"it cannot be loaded ({error})"
        if why is not None:
            self._carry_out(candidate, Decision(False, why))
            return
        self._comparing.clear()
        self._running = Running(candidate, student)
        self._gauges.active.set(1)
        logger.info("%s is on trial: %s, share %g", candidate.version, candidate.mode, candidate.share)

    def _conclude(self, running: Running) -> None:
        decision = decide(running.candidate.live, running.tally, time.monotonic() - running.started)
        if decision is not None and running.candidate.mode != "wait":
            self._carry_out(running.candidate, decision)

    def _carry_out(self, candidate: Candidate, decision: Decision) -> None:
        """Move the pointers. Whatever comes of that, this replica ends the trial of one that is not good enough."""
        if not decision.promote:
            self._refused = candidate
            self._end(f"{candidate.version} is rolled back: {decision.why}")
        try:
            end_trial(self._registry, candidate, decision, _who())
        except Superseded:
            logger.info("%s: another replica, or a person, was faster", candidate.version)
            return
        except (FedPPDError, OSError) as error:
            self._gauges.decisions.inc("not written")
            logger.error("%s: the decision could not be written to the registry: %s", candidate.version, error)
            return
        self._gauges.decisions.inc("promoted" if decision.promote else "rolled back")
        if decision.promote:
            self._promoted()
            self._end(f"{candidate.version} is promoted: {decision.why}")

    def _end(self, why: str) -> None:
        self._running = None
        self._comparing.clear()
        self._gauges.active.set(0)
        logger.info("%s", why)

    def _pair(self) -> tuple[ServedStudent, ServedStudent, Tally] | None:
        running = self._running
        return None if running is None else (self._current(), running.student, running.tally)

    def describe(self) -> dict[str, Any] | None:
        """For `/model`: what is on trial, and how it stands."""
        running = self._running
        if running is None:
            return None
        candidate, tally = running.candidate, running.tally
        return {
            "version": candidate.version,
            "mode": candidate.mode,
            "share": candidate.share,
            "since": candidate.since,
            "compared": tally.requests,
            "needed": candidate.live.requests,
            "figures": tally.figures(),
        }


def unfit(current: ServedStudent, candidate: ServedStudent) -> str | None:
    """Why a candidate cannot answer the requests that the current student answers; None where it can."""
    if candidate.description != current.description:
        return "it takes other inputs than current"
    if candidate.card["classes"] != current.card["classes"]:
        return "it knows other classes than current"
    for part in ("abstention", "conformal"):
        if bool(candidate.card.get(part)) != bool(current.card.get(part)):
            return f"of it and current, one has no {part} in its card"
    return None


def _who() -> str:
    return f"service@{socket.gethostname()}, replica {os.getpid()}"


class _Gauges:
    def __init__(self, metrics: Metrics) -> None:
        self.active = Gauge("fedppd_trial_active", "1 while a candidate is on trial in this replica.")
        self.compared = Gauge("fedppd_trial_compared_requests", "Requests compared in this trial.")
        self.dropped = Counter("fedppd_trial_dropped_requests", "Requests not compared, to keep others fast.", [])
        self.canary = Counter("fedppd_canary_requests", "Requests given to a candidate.", [])
        self.decisions = Counter("fedppd_trial_decisions", "Trials ended by this replica.", ["decision"])
        self._figures = {
            "disagreement": Gauge("fedppd_trial_disagreement_percent", "Rows with another label."),
            "entropy": Gauge("fedppd_trial_entropy_difference_nats", "Candidate's mean entropy minus current's."),
            "abstention": Gauge("fedppd_trial_abstention_difference_points", "Candidate's rate minus current's."),
            "set_size": Gauge("fedppd_trial_set_size_difference", "Candidate's mean size minus current's."),
            "latency": Gauge("fedppd_trial_latency_ratio", "Candidate's forward pass by current's, the median."),
        }
        counters = (self.dropped, self.canary, self.decisions)
        metrics.add(self.active, self.compared, *counters, *self._figures.values())

    def show(self, tally: Tally) -> None:
        self.compared.set(tally.requests)
        for name, value in tally.figures().items():
            self._figures[name].set(value)
