"""Where students can be promoted to: a registry of our own, or MLflow's."""

from typing import Any, Protocol

from fedppd_ray.releases.layout import VERSION
from fedppd_ray.releases.promotion import Wish, promote, promote_version, rollback, withdraw
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import State
from fedppd_ray.releases.verdict import Verdict

MLFLOW = "mlflow://"


class Target(Protocol):
    def promote(self, run: str, wish: Wish) -> Verdict:
        """`run`: a run, or the name of a version that is there."""

    def rollback(self, who: str, reason: str, version: str | None, candidate: bool) -> str:
        """What was done, for people."""

    def versions(self) -> list[dict[str, Any]]:
        """version, name, round, registered, by and status of each, the newest last."""


class OwnTarget:
    """A folder or URL."""

    def __init__(self, location: str) -> None:
        self._location = location

    def promote(self, run: str, wish: Wish) -> Verdict:
        if VERSION.fullmatch(run):
            return promote_version(run, Registry.open(self._location), wish)
        return promote(run, Registry.open_or_create(self._location), wish)

    def rollback(self, who: str, reason: str, version: str | None, candidate: bool) -> str:
        registry = Registry.open(self._location)
        entry = withdraw(registry, who, reason) if candidate else rollback(registry, who, reason, version)
        return f"{entry.version} is rolled back; current is {entry.state.current}"

    def versions(self) -> list[dict[str, Any]]:
        registry = Registry.open(self._location)
        state = registry.state()
        return [{**known, "status": _status(known["version"], state, registry)} for known in registry.versions()]


def _status(version: str, state: State, registry: Registry) -> str:
    if version == state.current:
        return "current"
    if state.candidate is not None and version == state.candidate.version:
        share = f" {state.candidate.share:g}" if state.candidate.share else ""
        return f"candidate ({state.candidate.mode}{share})"
    verdict = registry.verdict_of(version)
    return "refused" if verdict is not None and not verdict.let_through else ""


def target_at(location: str) -> Target:
    if location.startswith(MLFLOW):
        from fedppd_ray.releases.mlflow_target import MlflowTarget

        return MlflowTarget(location.removeprefix(MLFLOW))
    return OwnTarget(location)
