"""How a run looks from outside: a live display on a terminal, plain log lines elsewhere."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import ClientInfo, Failure, Receipt

log = logging.getLogger("fedppd")


def open_display() -> Observer:
    """For one run; it closes itself when the run ends, one way or the other."""
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


class PlainDisplay(Observer):
    """One line per round, one a failure: for files, jobs and pipes."""

    def __init__(self) -> None:
        self._rounds = 0
        self._seconds: list[float] = []

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        self._rounds = config.federation.rounds
        rows = sorted(info.rows for info in clients)
        log.info(
            "%s: %s on %s, %d clients with %d to %d rows, rounds %d to %d",
            config.name, config.method, config.data.name, len(clients), rows[0], rows[-1], first_round, self._rounds,
        )  # fmt: skip

    def client_done(self, receipt: Receipt) -> None:
        log.debug("round %d: %s done %s", receipt.round, receipt.client, dict(receipt.metrics))

    def client_failed(self, failure: Failure, action: Action) -> None:
        fate = "trying again" if action is Action.RETRY else "dropped for this round"
        fields = {"client": failure.client, "reason": failure.reason, "action": action.value}
        log.warning("%s failed (%s): %s", failure.client, failure.reason, fate, extra={"fields": fields})

    def server_lost(self, round_id: int, reason: str) -> None:
        log.warning("round %d starts again from the state before it: %s", round_id, reason)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        self._seconds.append(record["seconds"])
        log.info("%s", self._line(record), extra={"fields": dict(record)})

    def _line(self, record: Mapping[str, Any]) -> str:
        parts = [f"round {record['round']}/{self._rounds}", f"{record['clients']} clients"]
        if record["failed"]:
            parts.append(f"{record['failed']} failed")
        if record["accuracy"] is not None:
            parts.append(f"accuracy {record['accuracy']:.2f} %")
            parts.append(f"ECE {record['ece']:.2f} %")
            parts.append(f"NLL {record['nll']:.3f}")
        parts.append(f"{record['seconds']:.1f} s")
        left = self._left(record["round"])
        return "  ".join(parts) + (f"  {_clock(left)} left" if left > 0 else "")

    def _left(self, round_id: int) -> float:
        recent = self._seconds[-5:]
        return (self._rounds - round_id) * sum(recent) / len(recent)


class LiveDisplay(PlainDisplay):
    """Two bars, rounds and clients of the round, under the scrolling lines of finished rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._run = self._progress.add_task("starting Ray and the clients", total=None, note="")
        self._clients = self._progress.add_task("clients", total=None, note="", visible=False)
        self._progress.start()

    def run_finished(self) -> None:
        self._progress.stop()

    def run_failed(self, error: BaseException) -> None:
        self._progress.stop()

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        super().run_started(config, first_round, clients)
        self._progress.update(
            self._run, description="rounds", total=config.federation.rounds, completed=first_round - 1
        )

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        self._progress.reset(self._clients, total=len(selected), visible=True, description=f"round {round_id}")

    def client_done(self, receipt: Receipt) -> None:
        super().client_done(receipt)
        self._progress.advance(self._clients)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        super().round_finished(record)
        left = self._left(record["round"])
        note = f"{_clock(left)} left"
        if record["accuracy"] is not None:
            note = f"accuracy {record['accuracy']:.2f} %  ECE {record['ece']:.2f} %  {note}"
        self._progress.update(self._run, completed=record["round"], note=note)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
