"""Where the student comes from: a run, whose newest export is served, or a registry, whose current version is."""

from typing import Any, Protocol

from fedppd_ray.errors import CheckpointError
from fedppd_ray.releases.registry import Registry, is_registry
from fedppd_ray.runs.export import read_card
from fedppd_ray.runs.remote import Location


class Source(Protocol):
    registry: Registry | None

    def card(self) -> dict[str, Any]:
        """Of what should be served now; CheckpointError where that cannot be."""

    def location(self) -> Location:
        """Where it is, as `read_student` wants it."""


class RunSource:
    registry: Registry | None = None

    def __init__(self, run: Location) -> None:
        self._run = run

    def card(self) -> dict[str, Any]:
        return read_card(self._run)

    def location(self) -> Location:
        return self._run


class RegistrySource:
    """Follows `current`. A version does not change: its card is read once, and only if it is what was registered."""

    def __init__(self, registry: Registry) -> None:
        self.registry: Registry | None = registry
        self._follows = registry
        self._seen: str | None = None
        self._card: dict[str, Any] = {}

    def card(self) -> dict[str, Any]:
        version = self._current()
        if version != self._seen:
            self._card = read_card(self._follows.verified(version))
            self._seen = version
        return self._card

    def location(self) -> Location:
        return self._follows.verified(self._current())

    def _current(self) -> str:
        current = self._follows.state().current
        if current is None:
            raise CheckpointError(f"{self._follows.location}: nothing is current; `fedppd promote` makes a version so")
        return current


def source_of(location: Location) -> Source:
    return RegistrySource(Registry.open(location)) if is_registry(location) else RunSource(location)
