"""Does what is asked still look like the calibration rows? Windows of answers against what the export recorded.

A request hands its log-probabilities over and goes on; a thread of low priority counts them. A window closes when
`drift_seconds` have passed and `FEWEST_ROWS` rows have come; it is compared once (`inference/drift.py`). At most
86,400 / `drift_seconds` + 1 windows close in 24 hours, and each is looked at with that part of
`drift_false_alarms`: without drift, at most this share of days has an alarm, in each replica.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from fedppd_ray.inference.drift import Finding, Tallies, compared, reference_of, tallied
from fedppd_ray.inference.scores import Floats
from fedppd_ray.seeding import numpy_generator_for
from serve.metrics import Counter, Gauge, Metrics
from serve.priority import lower_priority
from serve.settings import Settings
from serve.student import ServedStudent

logger = logging.getLogger("fedppd.serve")

STEP_SECONDS = 1.0
FEWEST_ROWS = 100
MOST_ROWS = 5000  # of a window; exact tests of more would take longer and find nothing that matters more
_WAITING_ROWS = 8192  # that wait to be counted; beyond, some are left out
_DAY = 86_400
_WEBHOOK_SECONDS, _WEBHOOK_TRIES = 5.0, 3

Notify = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Known:
    """The export that windows are compared with."""

    student: ServedStudent
    reference: Tallies
    directions: Floats


class _Findings:
    """Gauges of the last window, by test."""

    def __init__(self) -> None:
        self.last: dict[str, Finding] = {}

    def metric(self) -> Metric:
        text = "Change in the last window: KS of entropies, stability index of classes, MMD of projections."
        family = GaugeMetricFamily("fedppd_drift_statistic", text, labels=["test"])
        for name, finding in self.last.items():
            family.add_metric([name], finding.statistic)
        return family


class Drift:
    """Of one replica. `note` is called by requests, `step` by one thread."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        notify: Notify | None = None,
    ) -> None:
        self._seconds, self._clock = settings.drift_seconds, clock
        self._false_alarms = settings.drift_false_alarms
        self.level = self._false_alarms / (_DAY // self._seconds + 1)
        self._notify = notify or (webhook(settings.drift_webhook) if settings.drift_webhook else None)
        self._waiting: deque[tuple[ServedStudent, Floats]] = deque()
        self._rows_waiting = 0
        self._known: _Known | None = None
        self._window: Tallies | None = None
        self._began = clock()
        self._look = 0
        self._drifting = False
        self._last: dict[str, Any] | None = None
        self._findings = _Findings()
        self._gauge = Gauge("fedppd_drift", "1 while the last window does not look like the calibration rows.")
        self._looks = Counter("fedppd_drift_windows", "Windows that were compared, by what was found.", ["result"])
        metrics.add(self._gauge, self._looks, self._findings)

    def note(self, student: ServedStudent, evidence: Floats) -> None:
        """On the event loop: an append, and nothing more."""
        if self._rows_waiting < _WAITING_ROWS and student.card.get("drift"):
            self._waiting.append((student, evidence))
            self._rows_waiting += len(evidence)

    def begin(self) -> None:
        """In the thread that will call `step`."""
        lower_priority()

    def step(self) -> None:
        """Count what has come; close the window if it is time."""
        self._rows_waiting = 0
        parts: list[Floats] = []
        while self._waiting:
            student, evidence = self._waiting.popleft()
            if self._known is None or student is not self._known.student:
                self._take(parts)
                parts = []
                self._begin(student)
            parts.append(evidence)
        self._take(parts)
        now = self._clock()
        if self._window is not None and self._window.rows >= FEWEST_ROWS and now - self._began >= self._seconds:
            self._compare(self._window, now)

    def _begin(self, student: ServedStudent) -> None:
        """Another export has other calibration rows: what was counted for the old one tells nothing of it."""
        self._known = _Known(student, *reference_of(student.card["drift"]))
        self._window, self._last = None, None
        self._findings.last = {}
        self._began = self._clock()
        self._settle(False)

    def _take(self, parts: list[Floats]) -> None:
        if not parts or self._known is None:
            return
        room = MOST_ROWS - (self._window.rows if self._window else 0)
        rows = np.concatenate(parts)[: max(0, room), : self._known.directions.shape[1]]
        if len(rows):
            found = tallied(rows, self._known.directions)
            self._window = found if self._window is None else self._window + found

    def _compare(self, window: Tallies, now: float) -> None:
        known = self._known
        if known is None:
            return
        self._look += 1
        generator = numpy_generator_for(self._look, "drift/permutations")
        found = compared(known.reference, window, self.level, generator)
        drifted = any(finding.drifted for finding in found.values())
        self._findings.last = found
        self._looks.inc("drift" if drifted else "quiet")
        self._last = {
            "from": _time(self._began),
            "to": _time(now),
            "rows": window.rows,
            "drifted": drifted,
            "tests": {name: {**asdict(finding), "drifted": finding.drifted} for name, finding in found.items()},
        }
        self._window, self._began = None, now
        if drifted != self._drifting:
            self._settle(drifted)
            self._tell(known.student, drifted)

    def _settle(self, drifted: bool) -> None:
        self._drifting = drifted
        self._gauge.set(float(drifted))

    def _tell(self, student: ServedStudent, drifted: bool) -> None:
        which = ", ".join(name for name, finding in self._findings.last.items() if finding.drifted)
        if drifted:
            logger.warning(
                "drift: what is asked does not look like the calibration rows of %s (%s)", student.version, which
            )
        else:
            logger.info("drift: what is asked looks like the calibration rows of %s again", student.version)
        if self._notify is not None:
            self._notify(
                {"event": "drift" if drifted else "drift_over", "model": student.reference, "window": self._last}
            )

    def describe(self, student: ServedStudent) -> dict[str, Any]:
        """`GET /drift`."""
        recorded = bool(student.card.get("drift"))
        waiting = "waiting" if self._last is None else ("drift" if self._drifting else "quiet")
        return {
            "status": waiting if recorded else "unknown",
            "model": student.reference,
            "calibration_rows": student.card["drift"]["rows"] if recorded else 0,
            "false_alarms_a_day": self._false_alarms,
            "level": self.level,
            "window_seconds": self._seconds,
            "window_rows": self._window.rows if self._window else 0,
            "last": self._last,
        }


def webhook(url: str) -> Notify:
    """POSTs JSON, in the thread that found the drift; a receiver that does not answer costs seconds and no request."""

    def notify(event: dict[str, Any]) -> None:
        for attempt in range(_WEBHOOK_TRIES):
            try:
                content = json.dumps(event).encode()
                answer = httpx.post(url, content=content, headers={"Content-Type": "application/json"},
                                    timeout=_WEBHOOK_SECONDS)  # fmt: skip
                answer.raise_for_status()
                return
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                logger.warning("drift: the webhook failed (attempt %d): %s", attempt + 1, type(error).__name__)
                time.sleep(2.0**attempt if attempt + 1 < _WEBHOOK_TRIES else 0)

    return notify


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
