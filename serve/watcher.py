"""Looks at the run folder every so often, in a thread of its own, so that no request waits for a load."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("fedppd.serve")


class Watcher:
    def __init__(self, refresh: Callable[[], object], seconds: float, begin: Callable[[], None] = lambda: None) -> None:
        self._refresh, self._begin = refresh, begin
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch-export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        self._begin()
        while not self._stop.wait(self._seconds):
            try:
                self._refresh()
            except Exception:  # the old student serves on; a watcher that died would never load another
                logger.exception("looking for a new export failed; trying again in %g s", self._seconds)
