"""One exported student, ready to serve: checked, warmed up, never changed. A reload makes another one."""

import math
import time
from typing import Any

import numpy as np

from fedppd_ray.checkpoint.remote import Location
from fedppd_ray.errors import CheckpointError
from fedppd_ray.evaluation.metrics import Floats
from fedppd_ray.prediction import Pixels, Student, abstention_level
from serve.schemas import Validator, input_validator

# A forward pass this short may run on the event loop itself.
_QUICK_SECONDS = 0.004
_WARM_UP_ROWS = 16


class ServedStudent:
    def __init__(self, student: Student, max_images: int) -> None:
        self.card: dict[str, Any] = student.card
        self.shape = student.shape
        self.name: str = student.card["name"]
        self.version: str = student.card["version"]
        self.round: int = student.card["round"]
        self.reference = {"name": self.name, "version": self.version, "round": self.round}
        self.validator: Validator = input_validator(student.shape, max_images)
        self._student = student
        self._seconds_a_row = self._warm_up()

    @classmethod
    def load(cls, run: Location, max_images: int) -> "ServedStudent":
        """Reads and tries the export; raises `CheckpointError` for one that must not be served."""
        try:
            return cls(Student.load(run), max_images)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            # The card is outside data: a missing or odd entry is a broken export, not a bug here.
            raise CheckpointError(f"{run}: the export cannot be served ({type(error).__name__}: {error})") from error

    def log_probabilities(self, pixels: Pixels) -> Floats:
        return self._student.log_probabilities(pixels)

    def is_quick(self, rows: int) -> bool:
        return rows * self._seconds_a_row < _QUICK_SECONDS

    def check(self) -> None:
        """Raises unless a prediction comes out finite."""
        answer = self.log_probabilities(np.zeros((1, *self.shape), np.uint8))
        if not np.isfinite(np.exp(answer)).all() or answer.shape != (1, len(self.card["classes"])):
            raise CheckpointError(f"{self.name} {self.version}: its predictions are not finite")

    def _warm_up(self) -> float:
        """The first passes of a network are slow; nobody's request should be one. Returns seconds a row."""
        self.check()
        level = abstention_level(self.card)
        if level and not math.isfinite(level["threshold"]):
            raise CheckpointError(f"{self.name} {self.version}: its abstention threshold is not finite")
        rows = np.zeros((_WARM_UP_ROWS, *self.shape), np.uint8)
        fastest = math.inf
        for _ in range(5):
            started = time.perf_counter()
            self.log_probabilities(rows)
            fastest = min(fastest, time.perf_counter() - started)
        return fastest / _WARM_UP_ROWS
