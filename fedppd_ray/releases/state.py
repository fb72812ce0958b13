"""What a registry points to, and the lines of its log. Each line has the state that it leads to."""

import getpass
import socket
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedppd_ray.releases.live import LiveGates

Mode = Literal["wait", "shadow", "canary"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(_Frozen):
    """A version on trial beside the current one, and the live gates that end the trial."""

    version: str
    mode: Mode
    share: float = Field(ge=0, le=1)
    live: LiveGates
    since: str


class State(_Frozen):
    current: str | None = None
    candidate: Candidate | None = None
    previous: tuple[str, ...] = ()  # what was current before, the newest first

    def with_current(self, version: str) -> "State":
        """Another current; a trial beside the old one means nothing any more."""
        before = (self.current, *self.previous) if self.current else self.previous
        return State(current=version, previous=before)

    def with_candidate(self, candidate: Candidate | None) -> "State":
        return self.model_copy(update={"candidate": candidate})

    def rolled_back(self) -> "State":
        return State(current=self.previous[0], previous=self.previous[1:])


What = Literal["promoted", "refused", "candidate", "rolled back"]  # the version that the line names


class Entry(_Frozen):
    """A line of the audit log: who did what when, and why. `before` is the digest of the line before."""

    number: int
    time: str
    who: str
    what: What
    version: str
    why: str
    forced: bool = False
    state: State
    before: str


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def whoami() -> str:
    """The user and the machine. Nobody proves it: who may write to the registry is for its storage to say."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
