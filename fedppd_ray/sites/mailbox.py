"""Where a round's work waits for a site, and a site's answer for the round. Threads on both sides; nothing is on disk.

One mailbox a site. The round's side blocks in `ask`; the gateway's side never blocks longer than it says. Who is not
heard of for `patience_s` is lost: at once where that was known before, so that an absent site costs no round its time.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedppd_ray.errors import FedPPDError, LocalUpdateCancelled
from fedppd_ray.federation.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.sites.wire import Ask, Body, Commit, Offer, Task, encode

_LOOK_S = 1.0  # between two looks at whether a site is still alive


class SiteLostError(FedPPDError):
    """A site is not there, or is not heard of any more."""


class SiteRefusedError(FedPPDError):
    """A site will not do this: its policy says no."""


class SiteFailedError(FedPPDError):
    """A site could not do it."""


class BoxAway(FedPPDError):
    """A mailbox does not answer: its process is being replaced."""


class Box(Protocol):
    """A mailbox as the gateway sees it, wherever it is. Calls may block for a moment, and raise BoxAway."""

    def hear(self, presence: Ask) -> None: ...
    def put_out(self) -> None: ...
    def offer(self, wait_s: float) -> Offer | None: ...
    def wanted(self, task: Task) -> bool: ...
    def body(self, digest: str) -> bytes | None: ...
    def accepted(self, commit: Commit) -> bool: ...
    def deliver(self, commit: Commit, models: Mapping[str, Any]) -> bool: ...
    def tell(self, task: Task, numbers: Answer | None) -> bool: ...
    def fail(self, task: Task, reason: str, refused: bool) -> bool: ...


@dataclass(frozen=True)
class _Answered:
    """To a question; None: there are too few rows to speak about."""

    numbers: Answer | None


@dataclass
class _Open:
    """The task that waits, and what came of it."""

    task: Task
    body: Body
    question: Mapping[str, Any] | None = None  # then an answer to it is waited for, and no update
    answer: ClientUpdate | _Answered | Exception | None = None


class Mailbox:
    def __init__(
        self,
        site: str,
        client: str,
        run: str,
        config: Mapping[str, Any],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config`: what the site is told of the run, as values."""
        self.site, self.client = site, client
        self._run, self._config = run, dict(config)
        self._patience_s, self._clock = patience_s, clock
        self._changed = threading.Condition()
        self._heard: float | None = None
        self._made = clock()  # a mailbox that was replaced gives its site time to be heard again
        self._presence: Ask | None = None
        self._out = False
        self._attempts: dict[int, int] = {}
        self._open: _Open | None = None
        self._accepted: tuple[str, int, str] | None = None  # run, round and digest of the last update that was taken

    # ---- the round's side

    def info(self) -> ClientInfo | None:
        """What is known of its data; None: it has not been heard of."""
        with self._changed:
            if self._presence is None or not self._alive():
                return None
            counts = self._presence.class_counts
            return ClientInfo(self.client, self._presence.rows or 0, counts, tuple(count > 0 for count in counts))

    def ask(self, state: GlobalState) -> ClientUpdate:
        """Block until the site answers, or is lost."""
        found = self._wait_for(state, None)
        if not isinstance(found, ClientUpdate):
            raise TypeError("not an update")
        return found

    def ask_about(self, state: GlobalState, question: Question) -> Answer | None:
        """The same of a question; None where it is not one that may be asked, or keeps too few rows back."""
        with self._changed:
            if self._presence is None or not self._presence.answers:
                return None
        found = self._wait_for(state, question.told())
        return found.numbers if isinstance(found, _Answered) else None

    def _wait_for(self, state: GlobalState, question: Mapping[str, Any] | None) -> ClientUpdate | _Answered:
        body, round_id = encode(state.models), state.round + 1
        with self._changed:
            self._attempts = {round_id: self._attempts.get(round_id, 0) + 1}
            task = Task(run=self._run, round=round_id, attempt=self._attempts[round_id])
            mine = self._open = _Open(task, body, question)
            self._changed.notify_all()
            try:
                while mine.answer is None and self._open is mine:
                    if not self._alive():
                        raise SiteLostError(f"{self.site} {self._silence()}")
                    self._changed.wait(_LOOK_S)
            finally:
                if self._open is mine:
                    self._open = None
        if mine.answer is None:
            raise LocalUpdateCancelled(f"{self.site}: told to give up round {round_id}")
        if isinstance(mine.answer, Exception):
            raise mine.answer
        return mine.answer

    def cancel(self, round_id: int) -> None:
        with self._changed:
            if self._open is not None and self._open.task.round <= round_id:
                self._open = None
                self._changed.notify_all()

    def _alive(self) -> bool:
        if self._out:
            return False
        return self._clock() - (self._made if self._heard is None else self._heard) < self._patience_s

    def _silence(self) -> str:
        if self._out:
            return "was removed from the federation"
        if self._heard is None:
            return "has not joined this run; `fedppd site run` there"
        return f"was last heard of {self._clock() - self._heard:.0f} s ago"

    # ---- the gateway's side

    def hear(self, presence: Ask) -> None:
        with self._changed:
            self._heard = self._clock()
            self._presence, self._out = presence, False
            self._changed.notify_all()

    def put_out(self) -> None:
        """The site was removed: no round waits for it any longer."""
        with self._changed:
            self._out = True
            self._changed.notify_all()

    def _progress(self) -> None:
        self._heard = self._clock()

    def offer(self, wait_s: float) -> Offer | None:
        """The task that waits, or the next one that does so within the time."""
        until = self._clock() + wait_s
        with self._changed:
            while (waiting := self._waiting()) is None:
                left = until - self._clock()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return Offer(
                task=waiting.task,
                client=self.client,
                config=self._config,
                state=waiting.body.blob,
                question=waiting.question,
            )

    def _waiting(self) -> _Open | None:
        return self._open if self._open is not None and self._open.answer is None else None

    def _answers(self, task: Task) -> _Open | None:
        waiting = self._waiting()
        return waiting if waiting is not None and waiting.task == task else None

    def wanted(self, task: Task) -> bool:
        """Whether anybody waits for this task; a sign of life."""
        with self._changed:
            self._progress()
            return self._answers(task) is not None

    def body(self, digest: str) -> bytes | None:
        with self._changed:
            self._progress()
            if self._open is None or self._open.body.blob.digest != digest:
                return None
            return self._open.body.content

    def accepted(self, commit: Commit) -> bool:
        """Whether this very update was taken before, and nobody asks for it again."""
        with self._changed:
            known = (commit.task.run, commit.task.round, commit.digest) == self._accepted
            return known and self._answers(commit.task) is None

    def deliver(self, commit: Commit, models: Mapping[str, Any]) -> bool:
        """Whether anybody waited for it."""
        with self._changed:
            self._progress()
            waiting = self._answers(commit.task)
            if waiting is None or waiting.question is not None:
                return False
            receipt = Receipt(self.client, commit.task.round, commit.rows, dict(commit.metrics))
            waiting.answer = ClientUpdate(receipt, models)
            self._accepted = (commit.task.run, commit.task.round, commit.digest)
            self._changed.notify_all()
            return True

    def tell(self, task: Task, numbers: Answer | None) -> bool:
        """Whether anybody waited for this answer to a question."""
        with self._changed:
            self._progress()
            waiting = self._answers(task)
            if waiting is None or waiting.question is None:
                return False
            waiting.answer = _Answered(numbers)
            self._changed.notify_all()
            return True

    def fail(self, task: Task, reason: str, refused: bool) -> bool:
        """Whether anybody waited for it."""
        with self._changed:
            self._progress()
            waiting = self._answers(task)
            if waiting is None:
                return False
            kind = SiteRefusedError if refused else SiteFailedError
            waiting.answer = kind(f"{self.site}: {reason}")
            self._changed.notify_all()
            return True
