"""Who watches a run: a terminal display, a log, gauges, a tracker. Methods do nothing unless they are overridden."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.failure_policy import Action
from fedppd_ray.federation.types import ClientInfo, Failure, Receipt


class Observer:
    """Called from the training loop, in this order; a slow observer slows the run."""

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        """Before the first round of this process."""

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        """Before a round's clients are asked."""

    def client_done(self, receipt: Receipt) -> None:
        """A client's update has arrived and passed the screen."""

    def client_failed(self, failure: Failure, action: Action) -> None:
        """A client's attempt failed; `action` is what becomes of it."""

    def server_lost(self, round_id: int, reason: str) -> None:
        """The server's process died: the round starts again from the state before it."""

    def exported(self, round_id: int, card: Mapping[str, Any]) -> None:
        """A student was exported; `card` is its model card."""

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """A round is saved; `record` is its line of metrics.jsonl."""

    def run_finished(self) -> None:
        """After the last round."""

    def run_failed(self, error: BaseException) -> None:
        """The run ends early, with everything saved that was finished: an error, or Ctrl-C."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def run_started(self, config: Config, first_round: int, clients: Sequence[ClientInfo]) -> None:
        for observer in self._observers:
            observer.run_started(config, first_round, clients)

    def round_started(self, round_id: int, selected: Sequence[str]) -> None:
        for observer in self._observers:
            observer.round_started(round_id, selected)

    def client_done(self, receipt: Receipt) -> None:
        for observer in self._observers:
            observer.client_done(receipt)

    def client_failed(self, failure: Failure, action: Action) -> None:
        for observer in self._observers:
            observer.client_failed(failure, action)

    def server_lost(self, round_id: int, reason: str) -> None:
        for observer in self._observers:
            observer.server_lost(round_id, reason)

    def exported(self, round_id: int, card: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.exported(round_id, card)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.round_finished(record)

    def run_finished(self) -> None:
        for observer in self._observers:
            observer.run_finished()

    def run_failed(self, error: BaseException) -> None:
        for observer in self._observers:
            observer.run_failed(error)
