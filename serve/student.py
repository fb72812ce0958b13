"""One exported student, ready to serve: checked, warmed up, never changed. A reload makes another one."""

import math
import time
from typing import Any

import numpy as np

from fedppd_ray.data.parts import RawRows
from fedppd_ray.errors import CheckpointError
from fedppd_ray.inference.abstention import abstention_level
from fedppd_ray.inference.scores import Floats
from fedppd_ray.inference.student import Student
from fedppd_ray.runs.export import load_student
from fedppd_ray.runs.remote import Location
from serve.schemas import Validator, input_validator
from serve.takes import ImageInput, TableInput, described, taken

# A forward pass this short may run on the event loop itself.
_QUICK_SECONDS = 0.004
_WARM_UP_ROWS = 16


class ServedStudent:
    def __init__(self, student: Student, max_images: int) -> None:
        self.description = described(student.card)
        self.takes = taken(self.description)
        self.card: dict[str, Any] = student.card
        self.name: str = student.card["name"]
        self.version: str = student.card["version"]
        self.round: int = student.card["round"]
        self.reference = {"name": self.name, "version": self.version, "round": self.round}
        # Of rows of a table, decoder processes are the judges.
        self.validator: Validator | None = (
            input_validator(self.takes, max_images) if isinstance(self.takes, ImageInput) else None
        )
        self._student = student
        self._seconds_a_row = self._warm_up()

    @classmethod
    def load(cls, run: Location, max_images: int) -> "ServedStudent":
        """Reads and tries the export; raises `CheckpointError` for one that must not be served."""
        try:
            return cls(load_student(run), max_images)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            # The card is outside data: a missing or odd entry is a broken export, not a bug here.
            raise CheckpointError(f"{run}: the export cannot be served ({type(error).__name__}: {error})") from error

    def log_probabilities(self, values: RawRows) -> Floats:
        """What `describe_predictions` takes: log-probabilities, and the score where it is no function of them."""
        return self._student.evidence(values)

    def is_quick(self, rows: int) -> bool:
        return rows * self._seconds_a_row < _QUICK_SECONDS

    def check(self) -> None:
        """Raises unless a prediction comes out finite."""
        answer = self._student.log_probabilities(self._example(1))
        if not np.isfinite(np.exp(answer)).all() or answer.shape != (1, len(self.card["classes"])):
            raise CheckpointError(f"{self.name} {self.version}: its predictions are not finite")

    def _example(self, rows: int) -> RawRows:
        """Black images, or average rows."""
        if isinstance(self.takes, TableInput):
            return np.zeros((rows, *self._student.shape), np.float32)
        return np.full((rows, *self.takes.shape), self.takes.range[0], np.float32)

    def _warm_up(self) -> float:
        """The first passes of a network are slow; nobody's request should be one. Returns seconds per row."""
        self.check()
        level = abstention_level(self.card)
        if level and not math.isfinite(level["threshold"]):
            raise CheckpointError(f"{self.name} {self.version}: its abstention threshold is not finite")
        rows = self._example(_WARM_UP_ROWS)
        fastest = math.inf
        for _ in range(5):
            started = time.perf_counter()
            self.log_probabilities(rows)
            fastest = min(fastest, time.perf_counter() - started)
        return fastest / _WARM_UP_ROWS
