"""Gates: bounds on figures, absolute or against the current version, and what each says of a version."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from fedppd_ray.config.section import Section


class Rule(Section):
    """Bounds on one figure, in its unit. Those against current are met where nothing is current yet."""

    at_least: float | None = None
    at_most: float | None = None
    worse_by: float | None = Field(None, ge=0, description="At most so much worse than current.")
    worse_by_percent: float | None = Field(None, ge=0, description="At most so many percent worse than current.")

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if not list(self.bounds()):
            raise ValueError("bounds nothing; give at_least, at_most, worse_by or worse_by_percent")
        return self

    def bounds(self) -> Iterator[tuple[str, float]]:
        for kind in _TEXTS:
            bound = getattr(self, kind)
            if bound is not None:
                yield kind, bound


class Figure(Section):
    """What a gate may look at."""

    name: str
    better: Literal["more", "less"]
    unit: str = ""

    def show(self, value: float | None) -> str:
        if value is None:
            return "–"
        text = f"{value:.2f}" if self.unit == "%" else f"{value:.4g}"
        return f"{text} {self.unit}".rstrip()


class Check(Section):
    """One bound, and how a version stands to it."""

    figure: str
    rule: str
    value: str
    current: str = "–"
    passed: bool
    note: str = ""


_TEXTS = {
    "at_least": "at least {}",
    "at_most": "at most {}",
    "worse_by": "at most {} worse than current",
    "worse_by_percent": "at most {:g} percent worse than current",
}


def checks(figure: Figure, rule: Rule, value: float | None, current: float | None, has_current: bool) -> list[Check]:
    """A figure that is not known meets no bound: a gate that cannot look stays shut."""
    found = []
    for kind, bound in rule.bounds():
        passed, note = _judged(figure, kind, bound, value, current, has_current)
        text = _TEXTS[kind].format(bound if kind == "worse_by_percent" else figure.show(bound))
        shown = {"value": figure.show(value), "current": figure.show(current)}
        found.append(Check(figure=figure.name, rule=text, passed=passed, note=note, **shown))
    return found


def _judged(
    figure: Figure, kind: str, bound: float, value: float | None, current: float | None, has_current: bool
) -> tuple[bool, str]:
    if value is None:
        return False, "not known of this version"
    if kind == "at_least":
        return value >= bound, ""
    if kind == "at_most":
        return value <= bound, ""
    if not has_current:
        return True, "nothing is current yet"
    if current is None:
        return False, "not known of current"
    allowed = bound if kind == "worse_by" else bound * abs(current) / 100
    worse = current - value if figure.better == "more" else value - current
    return worse <= allowed + 1e-12, ""
