"""What to do about a client that failed: a pure decision, tested without a cluster.

It lives beside the round loop, not in the runtime, because both executors follow it.
"""

import enum
import math
from dataclasses import dataclass


class Action(enum.Enum):
    RETRY = "retry"
    DROP = "drop"


@dataclass(frozen=True)
class FailurePolicy:
    """`retries` second chances a round for each client; `quorum` is the share that must deliver."""

    retries: int
    quorum: float

    def on_failure(self, attempts: int, late: bool) -> Action:
        """`attempts` made so far, the failed one included. Who missed the deadline has no time left to retry."""
        return Action.DROP if late or attempts > self.retries else Action.RETRY

    def needed(self, selected: int) -> int:
        """How many of the selected clients must deliver."""
        # The epsilon keeps 0.55 × 100 = 55.00000000000001 from asking for 56.
        return max(1, math.ceil(self.quorum * selected - 1e-9))
