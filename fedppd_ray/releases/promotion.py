"""Promote a run's student, or a version, and roll back: gates decide, and every decision is written down."""

from dataclasses import dataclass
from pathlib import Path

from fedppd_ray.errors import ConfigError, FedPPDError
from fedppd_ray.releases.figures import Figures, side_by_side
from fedppd_ray.releases.gates import Gates, parse_gates, read_gates
from fedppd_ray.releases.layout import GATES
from fedppd_ray.releases.live import Decision
from fedppd_ray.releases.registry import Registry
from fedppd_ray.releases.state import Candidate, Entry, Mode, State, What, now
from fedppd_ray.releases.verdict import Verdict
from fedppd_ray.runs.remote import Location


@dataclass(frozen=True)
class Trial:
    """How a candidate is tried beside the current version, before anybody calls it current."""

    mode: Mode
    share: float


@dataclass(frozen=True)
class Wish:
    """What the person at the command line asks for."""

    who: str
    gates: Path | None = None
    trial: Trial | None = None
    force: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if self.force and not self.reason.strip():
            raise ConfigError("--force: say why, with --reason; it is written into the audit log")


class Superseded(FedPPDError):
    """Somebody else has ended the trial that was to be decided."""


def promote(run: Location, registry: Registry, wish: Wish) -> Verdict:
    """Register the exported student of a run, let the gates judge it, and make it current or candidate if they do."""
    registry.settle()
    require_free(registry.state(), wish)
    gates, source = gates_for(wish, registry.own_gates(), f"{registry.location}/{GATES}")
    version = registry.stage(run)
    if version == registry.state().current:
        raise ConfigError(f"{run}: its student is current already ({version})")
    current = registry.state().current
    figures, beside = side_by_side(run, registry.folder_of(version), registry.verified(current) if current else None)
    if current and beside:
        beside["worst_site_accuracy"] = registry.figures(current).get("worst_site_accuracy")
    registry.seal(version, figures, run, wish.who)
    verdict = judged(version, current, figures, beside, gates, source, wish)
    registry.write_verdict(verdict)
    _carry_out(registry, verdict, wish)
    return verdict


def promote_version(version: str, registry: Registry, wish: Wish) -> Verdict:
    """Make a version that is registered already current or candidate, by what the gates have said of it."""
    registry.settle()
    require_free(registry.state(), wish, version)
    registry.verified(version)
    before = registry.verdict_of(version)
    if before is None:
        raise ConfigError(f"{version}: the gates have not seen it; promote the run that it comes from")
    if version == registry.state().current:
        raise ConfigError(f"{version}: is current already")
    forced = wish.force and not before.passed
    reason = wish.reason or f"as judged on {before.at}"
    verdict = before.model_copy(update={"at": now(), "who": wish.who, "forced": forced, "reason": reason})
    registry.write_verdict(verdict)
    _carry_out(registry, verdict, wish)
    return verdict


def judged(
    version: str,
    current: str | None,
    figures: Figures,
    beside: Figures | None,
    gates: Gates,
    source: str,
    wish: Wish,
) -> Verdict:
    checks = gates.checked(figures, beside)
    passed = all(check.passed for check in checks)
    return Verdict(
        version=version,
        against=current,
        at=now(),
        who=wish.who,
        passed=passed,
        forced=wish.force and not passed,
        reason=wish.reason.strip(),
        checks=tuple(checks),
        gates=gates,
        gates_from=source,
    )


def gates_for(wish: Wish, own: bytes | None, where: str) -> tuple[Gates, str]:
    """Those of the command, else the registry's `own`, else the built-in ones; and where they come from."""
    if wish.gates is not None:
        return read_gates(wish.gates), str(wish.gates)
    if own is not None:
        return parse_gates(own, where), "the registry"
    return Gates(), "the defaults"


def require_free(state: State, wish: Wish, version: str | None = None) -> None:
    if state.candidate is not None and state.candidate.version != version:
        raise ConfigError(
            f"{state.candidate.version} is on trial; wait for its live gates, or end the trial: "
            "fedppd rollback REGISTRY --candidate"
        )
    if wish.trial is not None and state.current is None:
        raise ConfigError("nothing is current yet, so there is nothing to be tried beside: promote it without a trial")


def _carry_out(registry: Registry, verdict: Verdict, wish: Wish) -> Entry:
    version, why = verdict.version, verdict.why()
    if not verdict.let_through:
        return registry.move(lambda state: state, who=wish.who, what="refused", version=version, why=why)

    def moved(state: State) -> State:
        require_free(state, wish, version)
        if wish.trial is None:
            return state.with_current(version)
        trial, live = wish.trial, verdict.gates.live
        return state.with_candidate(
            Candidate(version=version, mode=trial.mode, share=trial.share, live=live, since=now())
        )

    what: What = "promoted" if wish.trial is None else "candidate"
    return registry.move(moved, who=wish.who, what=what, version=version, why=why, forced=verdict.forced)


def rollback(registry: Registry, who: str, reason: str, version: str | None = None) -> Entry:
    """Back to the version that was current before, or to this one; a trial ends with it."""
    registry.settle()
    state = registry.state()
    target = version or (state.previous[0] if state.previous else None)
    if target is None:
        raise ConfigError(f"{registry.location}: nothing was current before; there is nothing to go back to")
    if target == state.current:
        raise ConfigError(f"{target}: is current already")
    registry.verified(target)

    def back(newest: State) -> State:
        if newest.current != state.current:
            raise ConfigError(f"{registry.location}: {newest.current} has become current meanwhile; look again")
        return newest.rolled_back() if version is None else newest.with_current(version)

    why = f"{reason or 'by hand'}; back to {target}"
    return registry.move(back, who=who, what="rolled back", version=str(state.current), why=why)


def withdraw(registry: Registry, who: str, reason: str) -> Entry:
    """End the trial of the candidate; current stays."""
    registry.settle()
    candidate = registry.state().candidate
    if candidate is None:
        raise ConfigError(f"{registry.location}: no candidate is on trial")
    return end_trial(registry, candidate, Decision(False, reason or "by hand"), who)


def end_trial(registry: Registry, candidate: Candidate, decision: Decision, who: str) -> Entry:
    """Promote a candidate or take it back. `Superseded` where this trial is over: the first decision counts."""

    def ended(state: State) -> State:
        if state.candidate != candidate:
            raise Superseded(f"{candidate.version}: this trial is over")
        return state.with_current(candidate.version) if decision.promote else state.with_candidate(None)

    what: What = "promoted" if decision.promote else "rolled back"
    return registry.move(ended, who=who, what=what, version=candidate.version, why=decision.why)
