"""The current student, and how another takes its place without a request noticing."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fedppd_ray.data.parts import RawRows
from fedppd_ray.errors import CheckpointError
from fedppd_ray.inference.scores import Floats
from fedppd_ray.runs.remote import Location
from serve.batching import Batcher
from serve.metrics import Metrics
from serve.settings import Settings
from serve.source import source_of
from serve.student import ServedStudent
from serve.trial import Trial

logger = logging.getLogger("fedppd.serve")

_ATTEMPTS, _PAUSE_SECONDS = 5, 0.2
_LONGEST_REASON = 300
_FOLDERS = re.compile(r"(?<![\w.…])/(?:[^\s/:'\"]+/)+")


Loader = Callable[[Location, int], ServedStudent]


@dataclass(frozen=True)
class Reload:
    """How the service stands to the run folder."""

    loaded_at: str
    reloads: int = 0
    refused: int = 0
    error: str | None = None


class Predictor:
    """Holds the current student. Loading happens in the caller's thread; the swap is one assignment."""

    def __init__(self, settings: Settings, metrics: Metrics, load: Loader = ServedStudent.load) -> None:
        self._settings = settings
        self.metrics = metrics
        self._run = settings.run
        self._source = source_of(settings.run)
        self._load = load
        self._student = self._read(_ATTEMPTS)
        self._refused: object = None
        self._state = Reload(_now())
        self._lock = threading.Lock()
        self._batcher = Batcher(settings.max_batch, settings.threads, metrics.batch_rows.observe)
        metrics.model_round.set(self._student.round)
        registry = self._source.registry
        self.watching = settings.watch or registry is not None
        self.trial = (
            Trial(registry, lambda: self.current, self.refresh, self._loaded, settings.trial_budget, metrics)
            if registry is not None
            else None
        )

    @property
    def current(self) -> ServedStudent:
        """Take it once for a request, and keep to it: a reload may come between two reads."""
        return self._student

    @property
    def state(self) -> Reload:
        return self._state

    async def log_probabilities(self, student: ServedStudent, values: RawRows) -> Floats:
        async with asyncio.timeout(self._settings.predict_timeout_seconds):
            return await self._batcher.log_probabilities(student, values)

    def refresh(self) -> bool:
        """Load the export in the run folder if it is not the one served; true where a new student was swapped in.

        Blocks while it loads: call it from a thread of its own. A broken export is refused, visibly, and tried
        again at each call, because it may be mended in place.
        """
        with self._lock:
            newest = self._newest()
            if newest == self._student.card:
                self._refused = None
                self._settle()
                return False
            known = newest == self._refused
            try:
                student = self._read(attempts=1 if known else _ATTEMPTS)
            except CheckpointError as error:
                if not known or _public(error, self._run) != self._state.error:
                    self._refuse(error)
                self._refused = newest
                return False
            self._refused = None
            self._swap(student)
            return True

    def _read(self, attempts: int) -> ServedStudent:
        """Weights and card are renamed one after the other: a reader in between sees a mismatch, and looks again."""
        for _ in range(attempts - 1):
            try:
                return self._loaded(self._source.location())
            except CheckpointError as error:
                logger.debug("reading %s again: %s", self._run, error)
                time.sleep(_PAUSE_SECONDS)
        return self._loaded(self._source.location())

    def _loaded(self, location: Location) -> ServedStudent:
        return self._load(location, self._settings.max_images)

    def _newest(self) -> object:
        """The card of what should be served, or the text of what is wrong with it."""
        try:
            return self._source.card()
        except CheckpointError as error:
            return str(error)
        except (KeyError, TypeError) as error:
            return f"the model card lacks or garbles {error}"

    def _settle(self) -> None:
        """The export that is served is the one in the folder (again)."""
        if self._state.error is not None:
            self._state = replace(self._state, error=None)
            self.metrics.reload_failing.set(0)
            logger.info("the run folder holds %s again, which is being served", self._student.version)

    def _swap(self, student: ServedStudent) -> None:
        old, self._student = self._student, student
        self._state = Reload(_now(), self._state.reloads + 1, self._state.refused)
        self.metrics.reloads.inc("swapped")
        self.metrics.reload_failing.set(0)
        self.metrics.model_round.set(student.round)
        logger.info("now serving %s %s (was %s)", student.name, student.version, old.version)

    def _refuse(self, error: Exception) -> None:
        self._state = replace(self._state, refused=self._state.refused + 1, error=_public(error, self._run))
        self.metrics.reloads.inc("refused")
        self.metrics.reload_failing.set(1)
        logger.error("refused an export, still serving %s: %s", self._student.version, error)

    def describe(self) -> dict[str, Any]:
        """The model card, and the state of reloading."""
        state = self._state
        return {
            **self._student.card,
            "reload": {
                "watching": self.watching,
                "loaded_at": state.loaded_at,
                "reloads": state.reloads,
                "refused": state.refused,
                "error": state.error,
            },
            **({} if self.trial is None else {"trial": self.trial.describe()}),
        }

    def close(self) -> None:
        self._batcher.close()


def _public(error: Exception, run: Location) -> str:
    """What anyone may read at `/model`: no folders of this machine, no native stack trace. The log has it all."""
    first, *_ = str(error).replace(f"{run}/", "").replace(str(run), "the run").splitlines() or [""]
    return _FOLDERS.sub("…/", first)[:_LONGEST_REASON]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
