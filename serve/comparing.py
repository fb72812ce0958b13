"""Two students asked about the same rows, beside the requests: never on their path, and within a budget of time.

Rows wait in a short queue; what does not fit is dropped. One thread of low priority takes some of them, asks both, and
rests so long that it works no more than the budget's share of a core.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedppd_ray.data.parts import RawRows
from fedppd_ray.inference.conformal import conformal_level
from fedppd_ray.inference.student import describe_predictions
from fedppd_ray.releases.live import Answers, Tally
from serve.metrics import Counter
from serve.priority import lower_priority
from serve.student import ServedStudent

logger = logging.getLogger("fedppd.serve")

MOST_WAITING = 128  # requests
_MOST_ROWS = 256  # of one comparison
_MOST_BYTES = 256 * 1024  # of one request's rows that are kept for it
_WORK_SECONDS = 0.005  # what one comparison should take
_IDLE_SECONDS = 0.05

Pair = Callable[[], tuple[ServedStudent, ServedStudent, Tally] | None]


class Comparing:
    """`pair` gives the current student, the candidate, and where to count; None: nothing is on trial."""

    def __init__(self, pair: Pair, budget: float, dropped: Counter) -> None:
        self._pair = pair
        self._budget = budget
        self._dropped = dropped
        self._waiting: deque[RawRows] = deque()
        self._rows = 1  # of the next comparison; grows and shrinks with the time that the last one took
        self._turn = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="compare", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def offer(self, values: RawRows) -> None:
        """Called on the event loop for each request: microseconds."""
        if len(self._waiting) >= MOST_WAITING:
            self._dropped.inc()
            return
        # A copy of a few rows: a view would keep a body of many megabytes alive.
        most = max(1, _MOST_BYTES // max(1, values[0].nbytes))
        self._waiting.append(values[:most].copy())

    def clear(self) -> None:
        self._waiting.clear()

    def _work(self) -> None:
        lower_priority()
        torch.set_num_threads(1)
        rest = _IDLE_SECONDS
        while not self._stop.wait(rest):
            taken, pair = self._take(), self._pair()
            if not taken or pair is None:
                rest = _IDLE_SECONDS
                continue
            seconds = self._compare(taken, *pair)
            rest = max(_IDLE_SECONDS / 10, seconds * (1 / self._budget - 1))
            fitting = int(self._rows * _WORK_SECONDS / max(seconds, 1e-6))
            self._rows = min(_MOST_ROWS, max(1, fitting, self._rows // 2), 2 * self._rows)

    def _take(self) -> list[RawRows]:
        """Requests of about as many rows as fit the time; at least one."""
        taken: list[RawRows] = []
        rows = 0
        while self._waiting and rows < self._rows:
            taken.append(self._waiting.popleft()[: self._rows])
            rows += len(taken[-1])
        return taken

    def _compare(self, taken: list[RawRows], current: ServedStudent, candidate: ServedStudent, tally: Tally) -> float:
        """Counts, and returns the seconds it took. A row that only the candidate cannot answer is its failure."""
        started = time.perf_counter()
        rows: Any = np.concatenate(taken)
        self._turn = not self._turn  # the second of the two finds the rows in the cache
        students = (current, candidate) if self._turn else (candidate, current)
        found: dict[int, Answers] = {}
        for student in students:
            try:
                found[id(student)] = answers_of(student, rows)
            except Exception as error:  # whatever it is, requests must not notice
                logger.error("%s could not be compared: %s", student.version, error)
        if id(current) in found:
            if id(candidate) in found:
                tally.add(found[id(current)], found[id(candidate)], len(taken))
            else:
                tally.fail()
        return time.perf_counter() - started


def answers_of(student: ServedStudent, rows: RawRows) -> Answers:
    """As a request would be answered; ValueError where that is no number."""
    started = time.perf_counter()
    evidence = student.log_probabilities(rows)
    seconds = time.perf_counter() - started
    log_probabilities = evidence[:, : len(student.card["classes"])]
    if not np.isfinite(np.exp(log_probabilities)).all():
        raise ValueError("its answer is not finite")
    card = student.card
    described = describe_predictions(card, evidence)
    labels, entropy, abstains = (
        np.array([answer[key] for answer in described]) for key in ("label", "entropy", "abstain")
    )
    sets = conformal_level(card, card["conformal"]["confidence"]) if card.get("conformal") else None
    sizes = None if sets is None else sets.members(log_probabilities).sum(axis=1).astype(float)
    return Answers(labels, entropy, abstains.astype(float), seconds, sizes)
