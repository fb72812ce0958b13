"""The `fedppd` command in a test: what it did, and that it refused politely. The fixture `fedppd` runs it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


def refused(done: Done, *parts: str) -> None:
    """Exit code 2 and one readable line."""
    assert done.code == 2, done
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert done.err.startswith("fedppd: ")
    assert "Traceback" not in done.out + done.err
    for part in parts:
        assert part in done.err
