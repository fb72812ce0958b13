"""Where work runs: what the round loop asks of the server, of the clients and of the evaluation, and of nothing else.

The loop decides; an executor moves. Each of its three parts can be replaced by itself: clients may be Ray actors,
virtual clients of a shared actor, or sites of their own.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.federation.types import ClientInfo, GlobalState, Receipt
from fedppd_ray.inference.questions import Answer, Question


@dataclass(frozen=True)
class Arrival:
    """A client's answer. `payload` is the executor's business (weights, or a reference to them)."""

    client: str
    receipt: Receipt
    payload: object


@dataclass(frozen=True)
class Lost:
    """A client's attempt that will bring no answer."""

    client: str
    reason: str
    late: bool = False


class ServerLink(Protocol):
    """The way to the server. Every call may raise ServerLostError: then `install` and the round again."""

    def install(self, state: GlobalState | None) -> None:
        """Give the server its state; None: the method's initial state for this seed."""

    def state(self) -> GlobalState: ...
    def begin(self, round_id: int) -> object:
        """Start a round, or start it again; returns what the clients are given (a state, or a reference to it)."""

    def refusal(self, arrival: Arrival) -> str | None:
        """Why this update may not count, or None."""

    def fold(self, arrival: Arrival) -> Receipt:
        """Add an update to the round's aggregate, in the order of the calls."""

    def finish(self) -> None:
        """The server update: aggregate what was folded into the next global state."""


class ClientPool(Protocol):
    """The clients, wherever they are."""

    def describe(self) -> list[ClientInfo]: ...
    def ask(self, question: Question, state: GlobalState) -> dict[str, Answer]:
        """What clients say of rows that they keep back, between two rounds, in the order of their names.

        Missing are those that keep none back, do not let it be known, or are lost; the latter are logged.
        """

    def open(self, round_id: int, published: object) -> None:
        """A round begins with what the server published. Answers to an earlier attempt count no more."""

    def start(self, client: str) -> None:
        """Ask a client of this round for its update, or ask again."""

    def next_event(self) -> Arrival | Lost:
        """Block until a client answers or is lost, whatever went wrong; a passed deadline loses all still out."""


class Evaluator(Protocol):
    def predict(self, split: str) -> NDArray[np.float64]:
        """Log-probabilities on 'test', 'calibration' or 'ood' of the predictor; on 'teacher:test' of the teacher."""


class Executor(Protocol):
    @property
    def server(self) -> ServerLink: ...
    @property
    def clients(self) -> ClientPool: ...
    @property
    def evaluation(self) -> Evaluator: ...
    def close(self) -> None: ...
