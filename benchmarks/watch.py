"""All processes of a command, wherever they went: their memory and their CPU time, from /proc.

They are found by a mark in their environment, which children inherit; parents and sessions are left behind by daemons.
"""

import os
import threading
from pathlib import Path

MARK = "FEDPPD_BENCH_MARK"
_TICK = os.sysconf("SC_CLK_TCK")
_EVERY_S = 0.5


class Watch:
    """Samples from a thread until `stop`; `peak_mb` is of the sum, each shared page counted once (PSS)."""

    def __init__(self, mark: str) -> None:
        self._wanted = f"{MARK}={mark}".encode()
        self._known: dict[int, bool] = {}
        self._cpu: dict[int, float] = {}
        self.peak_mb = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def cpu_seconds(self) -> float:
        """Of all processes so far, those that have ended included, as of their last sample."""
        return sum(self.by_process().values())

    def by_process(self) -> dict[int, float]:
        """The same by process id."""
        for pid in self.processes():
            self._note_cpu(pid)
        return dict(self._cpu)

    def processes(self) -> list[int]:
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and self._ours(int(entry))]

    def _ours(self, pid: int) -> bool:
        if not self._known.get(pid):  # asked again where it was not: between fork and exec it has another environment
            try:
                self._known[pid] = self._wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                return False
        return self._known[pid]

    def _sample(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            total = 0
            for pid in self.processes():
                self._note_cpu(pid)
                total += _pss_kb(pid)
            self.peak_mb = max(self.peak_mb, total / 1024)

    def _note_cpu(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICK


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
