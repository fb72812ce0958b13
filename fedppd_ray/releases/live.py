"""A candidate beside the current version, on the same requests: what is counted, and when that is enough to decide.

There is one look, after a number of requests that is fixed beforehand: whoever looked again and again until a bound is
met would promote by luck.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from pydantic import Field

from fedppd_ray.config.section import Section
from fedppd_ray.inference.scores import Floats, Labels

_LATENCIES = 1000


class LiveGates(Section):
    """Bounds on what a candidate does differently, on real requests. null: not looked at."""

    requests: int = Field(500, ge=1, description="So many are compared before it is decided.")
    minutes: float = Field(0.0, ge=0, description="And so much time has passed.")
    disagreement: float | None = Field(5.0, ge=0, description="Percent of rows with another label.")
    entropy: float | None = Field(0.2, ge=0, description="Difference of the mean entropies, in nats.")
    abstention: float | None = Field(5.0, ge=0, description="Difference of the abstention rates, in percentage points.")
    set_size: float | None = Field(1.0, ge=0, description="Difference of the mean sizes of prediction sets, if any.")
    latency: float | None = Field(2.0, gt=0, description="Times the current version's, of the same forward passes.")


@dataclass(frozen=True)
class Answers:
    """What one student says of some rows, and how long it took."""

    labels: Labels
    entropy: Floats
    abstains: Floats
    seconds: float
    set_sizes: Floats | None = None


@dataclass(frozen=True)
class Decision:
    promote: bool
    why: str


@dataclass
class Tally:
    """Sums over the requests that were compared. One thread adds, others read."""

    requests: int = 0
    rows: int = 0
    failures: int = 0
    _different: int = 0
    _entropy: float = 0.0
    _abstains: float = 0.0
    _set_size: float | None = None
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, current: Answers, candidate: Answers, requests: int) -> None:
        with self._lock:
            self.requests += requests
            self.rows += len(current.labels)
            self._different += int((current.labels != candidate.labels).sum())
            self._entropy += float((candidate.entropy - current.entropy).sum())
            self._abstains += float(candidate.abstains.sum() - current.abstains.sum())
            if current.set_sizes is not None and candidate.set_sizes is not None:
                difference = float(np.sum(candidate.set_sizes) - np.sum(current.set_sizes))
                self._set_size = (self._set_size or 0.0) + difference
            self._latencies.append(candidate.seconds / max(current.seconds, 1e-9))

    def fail(self) -> None:
        """The candidate could not answer what the current version answers."""
        with self._lock:
            self.failures += 1

    def figures(self) -> dict[str, float]:
        """Signed: above 0 the candidate has more. `disagreement` in percent, `abstention` in percentage points."""
        with self._lock:
            if not self.rows:
                return {}
            found = {
                "disagreement": 100 * self._different / self.rows,
                "entropy": self._entropy / self.rows,
                "abstention": 100 * self._abstains / self.rows,
                "latency": median(self._latencies),
            }
            return found if self._set_size is None else {**found, "set_size": self._set_size / self.rows}


_SHOWN = {
    "disagreement": ("{:.2f} %", "{:g} %"),
    "entropy": ("{:+.3f} nats", "±{:g}"),
    "abstention": ("{:+.2f} points", "±{:g}"),
    "set_size": ("{:+.3f}", "±{:g}"),
    "latency": ("{:.2f} times", "{:g}"),
}


def decide(gates: LiveGates, tally: Tally, seconds: float) -> Decision | None:
    """Whether to promote, with the reason; None while there is too little to decide on. A failure is enough."""
    if tally.failures:
        return Decision(False, f"it failed on {tally.failures} of the requests that current answers")
    if tally.requests < gates.requests or seconds < 60 * gates.minutes:
        return None
    met: list[str] = []
    missed: list[str] = []
    for name, value in tally.figures().items():
        bound = getattr(gates, name)
        if bound is not None:
            shown, allowed = _SHOWN[name]
            text = f"{name.replace('_', ' ')} {shown.format(value)} (at most {allowed.format(bound)})"
            (met if abs(value) <= bound else missed).append(text)
    after = f"{tally.requests:,} requests, {tally.rows:,} rows"
    if missed:
        return Decision(False, f"live gates not met after {after}: {'; '.join(missed)}")
    return Decision(True, f"live gates met after {after}: {'; '.join(met)}")
