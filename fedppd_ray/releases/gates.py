"""The gates of a promotion, from YAML: what an export must show on held-out rows, and what a candidate live."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedppd_ray.config.section import Section
from fedppd_ray.errors import ConfigError
from fedppd_ray.registry import suggest
from fedppd_ray.releases.live import LiveGates
from fedppd_ray.releases.rules import Check, Figure, Rule, checks

FIGURES = {
    figure.name: figure
    for figure in (
        Figure(name="accuracy", better="more", unit="%"),
        Figure(name="nll", better="less", unit="nats"),
        Figure(name="ece", better="less", unit="%"),
        Figure(name="coverage", better="more", unit="%"),
        Figure(name="accuracy_answered", better="more", unit="%"),
        Figure(name="set_coverage", better="more", unit="%"),
        Figure(name="set_size", better="less"),
        Figure(name="ood_auroc", better="more"),
        Figure(name="worst_client_accuracy", better="more", unit="%"),
        Figure(name="worst_site_accuracy", better="more", unit="%"),
        Figure(name="latency_ms", better="less", unit="ms"),
        Figure(name="size_mb", better="less", unit="MB"),
    )
}


class OfflineGates(Section):
    """All as the student is served: at its card's temperature, with its card's threshold."""

    accuracy: Rule | None = None
    nll: Rule | None = None
    ece: Rule | None = None
    coverage: Rule | None = None  # share of held-out rows that it answers
    accuracy_answered: Rule | None = None  # of those
    set_coverage: Rule | None = None  # prediction sets that hold the right class, at the card's confidence
    set_size: Rule | None = None  # classes that they name, on average
    ood_auroc: Rule | None = None
    worst_client_accuracy: Rule | None = None  # held-out rows in the mix of classes of the client that it serves worst
    worst_site_accuracy: Rule | None = None  # what the worst site found on rows of its own
    latency_ms: Rule | None = None  # of a forward pass of one row
    size_mb: Rule | None = None  # of the weights


# Where nobody says otherwise: no worse than current, and never badly calibrated.
_DEFAULT_OFFLINE = OfflineGates(
    accuracy=Rule(worse_by=1.0),
    nll=Rule(worse_by_percent=10.0),
    ece=Rule(at_most=5.0),
    latency_ms=Rule(worse_by_percent=100.0),
)


class Gates(Section):
    offline: OfflineGates = _DEFAULT_OFFLINE
    live: LiveGates = LiveGates()

    def checked(self, figures: Mapping[str, float | None], current: Mapping[str, float | None] | None) -> list[Check]:
        """Every bound on these figures; `current` are those of the current version, where there is one."""
        found: list[Check] = []
        for name, figure in FIGURES.items():
            rule = getattr(self.offline, name)
            if rule is not None:
                found += checks(figure, rule, figures.get(name), (current or {}).get(name), current is not None)
        return found


def read_gates(path: Path) -> Gates:
    try:
        return parse_gates(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: the gates cannot be read ({error.strerror})") from None


def parse_gates(content: bytes, source: str) -> Gates:
    """From YAML; ConfigError with one readable line."""
    try:
        values = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: is not YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: has no section; write offline: and live:")
    try:
        return Gates.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{source}: {where}: unknown key{_suggested(first['loc'])}") from None
        raise ConfigError(f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def _suggested(location: tuple[Any, ...]) -> str:
    sections: dict[Any, type[Section]] = {"offline": OfflineGates, "live": LiveGates}
    beside = Gates if len(location) == 1 else sections[location[0]] if len(location) == 2 else Rule
    return suggest(str(location[-1]), list(beside.model_fields))
