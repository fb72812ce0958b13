"""What the gates said of a version, for programs and for people."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedppd_ray.releases.gates import Gates
from fedppd_ray.releases.rules import Check


class Verdict(BaseModel):
    """`passed`: every gate was met. A forced version goes on although it was not, for a stated reason."""

    model_config = ConfigDict(frozen=True)

    version: str
    against: str | None
    at: str
    who: str
    passed: bool
    forced: bool
    reason: str
    checks: tuple[Check, ...]
    gates: Gates
    gates_from: str

    @property
    def let_through(self) -> bool:
        return self.passed or self.forced

    def why(self) -> str:
        """One line, for the log."""
        missed = [f"{check.figure} {check.value} ({_rule(check)})" for check in self.checks if not check.passed]
        text = f"gates not met: {'; '.join(missed)}" if missed else f"{len(self.checks)} gates met"
        return f"{text}; {self.reason}" if self.reason else text

    def rows(self) -> list[tuple[str, ...]]:
        """Figure, value, current, rule, outcome."""
        return [
            (check.figure, check.value, check.current, _rule(check), "met" if check.passed else "NOT MET")
            for check in self.checks
        ]

    def markdown(self) -> str:
        outcome = "passed" if self.passed else "forced" if self.forced else "refused"
        lines = [
            f"# {self.version}: {outcome}",
            "",
            f"{self.at}, by {self.who}, gates from {self.gates_from}, beside {self.against or 'no current version'}.",
            *(["", f"Reason given: {self.reason}"] if self.reason else []),
            "",
            *_table(("figure", "this version", "current", "gate", ""), self.rows()),
        ]
        return "\n".join(lines) + "\n"


def _rule(check: Check) -> str:
    return f"{check.rule}; {check.note}" if check.note else check.rule


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
