"""A registry of students: versions do not change, pointers move with a line in the log, gates decide."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.releases import registry as registries
from fedppd_ray.releases.live import Decision
from fedppd_ray.releases.promotion import Superseded, Trial, Wish, end_trial, promote, promote_version, rollback
from fedppd_ray.releases.registry import Registry, is_registry
from fedppd_ray.releases.state import State
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.signature import Key, sign_export
from fedppd_ray.runs.store import RunStore

OPEN = "offline: {accuracy: {at_least: 0}}\n"
SHUT = "offline: {accuracy: {at_least: 100.1}}\n"


@pytest.fixture
def make_run(finished_run: Path, tmp_path: Path) -> Callable[[int], Path]:
    """The run of a next round, whose student differs a little from all others."""

    def make(round_id: int) -> Path:
        folder = Path(shutil.copytree(finished_run, tmp_path / f"run{round_id}"))
        card, model = read_student(folder)
        with torch.no_grad():
            model.weights.mul_(1 + 1e-4 * round_id)
        kept = {key: card[key] for key in ("temperature", "score") if key in card}
        export_student(folder, RunStore(folder).config(), round_id, model, card["metrics"], card["abstention"], kept)
        return folder

    return make


@pytest.fixture
def wish(tmp_path: Path) -> Callable[..., Wish]:
    def make(gates: str = OPEN, **changes: Any) -> Wish:
        path = tmp_path / "gates.yaml"
        path.write_text(gates)
        return Wish(who="ada@lab", gates=path, **changes)

    return make


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry.open_or_create(tmp_path / "registry")


def lines(registry: Registry) -> list[tuple[str, str, str]]:
    return [(entry.who, entry.what, entry.version) for entry in registry.entries()]


def test_what_the_gates_let_through_is_current_and_can_be_read(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    run = make_run(3)
    verdict = promote(run, registry, wish())
    state = registry.state()
    assert (verdict.passed, state.current, state.candidate) == (True, verdict.version, None)
    assert read_card(registry.verified(verdict.version)) == read_card(run)
    assert lines(registry) == [("ada@lab", "promoted", verdict.version)]
    assert registry.verdict_of(verdict.version) == verdict
    found = [path for path in Path(registry.folder_of(verdict.version)).iterdir() if path.suffix == ".md"]
    assert "passed" in found[0].read_text()
    assert registry.figures(verdict.version)["accuracy"] == pytest.approx(read_card(run)["metrics"]["accuracy"])


def test_what_they_refuse_moves_no_pointer_and_is_written_down(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    first = promote(make_run(3), registry, wish()).version
    verdict = promote(make_run(4), registry, wish(SHUT))
    assert not verdict.let_through
    assert registry.state() == State(current=first)
    last = registry.entries()[-1]
    assert (last.what, last.version) == ("refused", verdict.version)
    assert "accuracy" in last.why
    assert "at least 100.10 %" in last.why
    with pytest.raises(ConfigError, match="--reason"):
        wish(SHUT, force=True)
    with pytest.raises(ConfigError, match="--reason"):
        wish(SHUT, force=True, reason=" ")


def test_force_needs_a_reason_that_the_log_keeps(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    verdict = promote(make_run(3), registry, wish(SHUT, force=True, reason="the old one is worse"))
    assert (verdict.passed, verdict.forced) == (False, True)
    assert registry.state().current == verdict.version
    entry = registry.entries()[0]
    assert entry.forced
    assert "the old one is worse" in entry.why


def test_rolling_back_goes_back_step_by_step(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    with pytest.raises(ConfigError, match="nothing was current"):
        rollback(registry, "ada", "")
    first, second, third = (promote(make_run(number), registry, wish()).version for number in (3, 4, 5))
    assert registry.state().previous == (second, first)
    rollback(registry, "ada", "too slow")
    assert registry.state() == State(current=second, previous=(first,))
    rollback(registry, "ada", "")
    assert registry.state() == State(current=first)
    with pytest.raises(ConfigError, match="nothing was current"):
        rollback(registry, "ada", "")
    rollback(registry, "ada", "it was good", third)
    assert registry.state() == State(current=third, previous=(first,))
    assert "too slow; back to" in registry.entries()[3].why


def test_a_candidate_is_promoted_or_rolled_back_once(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    with pytest.raises(ConfigError, match="nothing is current yet"):
        promote(make_run(2), registry, wish(trial=Trial("shadow", 1.0)))
    first = promote(make_run(3), registry, wish()).version
    second = promote(make_run(4), registry, wish(trial=Trial("shadow", 0.5))).version
    candidate = registry.state().candidate
    assert candidate is not None
    assert (registry.state().current, candidate.version, candidate.share) == (first, second, 0.5)
    with pytest.raises(ConfigError, match="is on trial"):
        promote(make_run(5), registry, wish())
    end_trial(registry, candidate, Decision(False, "it disagrees"), "service")
    assert registry.state() == State(current=first)
    with pytest.raises(Superseded):
        end_trial(registry, candidate, Decision(True, "it is fine"), "another")
    assert [entry.why for entry in registry.entries()][-1] == "it disagrees"
    # By hand, by its name: the gates have let it through.
    promote_version(second, registry, wish())
    assert registry.state().current == second


def test_a_version_that_was_refused_needs_force_by_its_name_too(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    promote(make_run(3), registry, wish())
    refused = promote(make_run(4), registry, wish(SHUT)).version
    assert not promote_version(refused, registry, wish()).let_through
    assert registry.state().current != refused
    promote_version(refused, registry, wish(force=True, reason="an emergency"))
    assert registry.state().current == refused


def test_current_is_judged_on_the_same_rows(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    promote(make_run(3), registry, wish())
    verdict = promote(make_run(4), registry, wish("offline: {accuracy: {worse_by: 5}, size_mb: {worse_by: 0}}"))
    assert verdict.passed
    assert all(check.current != "–" for check in verdict.checks)


def test_versions_do_not_change(registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]) -> None:
    run = make_run(3)
    version = promote(run, registry, wish()).version
    before = registry.manifest(version)
    second = promote(make_run(4), registry, wish()).version
    assert promote(run, registry, wish()).version == version  # the same export is the same version
    assert registry.manifest(version) == before
    card = Path(registry.folder_of(second)) / "student" / "model.json"
    card.write_text(card.read_text().replace('"round": 4', '"round": 5'))
    with pytest.raises(CheckpointError, match="not what was registered"):
        rollback(registry, "ada", "", second)
    assert registry.state().current == version


def test_a_signature_comes_along_and_is_asked_for(
    registry: Registry,
    make_run: Callable[[int], Path],
    wish: Callable[..., Wish],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = Key.make(tmp_path / "key")
    run = make_run(3)
    monkeypatch.setenv("FEDPPD_TRUSTED_KEY", key.public)
    with pytest.raises(CheckpointError, match="not signed"):
        promote(run, registry, wish())
    assert registry.state().current is None
    sign_export(run, key)
    read_card(registry.folder_of(promote(run, registry, wish()).version))


def test_a_changed_log_is_noticed(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    for number in (3, 4):
        promote(make_run(number), registry, wish())
    path = Path(registry.location) / "audit.jsonl"
    sound = path.read_text()
    path.write_text(sound.replace("ada@lab", "eve@lab", 1))
    with pytest.raises(CheckpointError, match="line 2"):
        registry.entries()
    path.write_text(sound.splitlines(keepends=True)[1])
    with pytest.raises(CheckpointError, match="line 1"):
        registry.entries()


def test_a_line_that_a_crash_tore_does_not_count(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    version = promote(make_run(3), registry, wish()).version
    path = Path(registry.location) / "audit.jsonl"
    path.write_text(path.read_text() + '{"number": 2, "ti')
    second = promote(make_run(4), registry, wish()).version
    assert [line[2] for line in lines(registry)] == [version, second]


def test_a_crash_between_log_and_pointers_is_set_right(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish], monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(make_run(3), registry, wish())
    run = make_run(4)
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(registries.Registry, "settle", lambda self: None if not self.has_died else killed())
        patch.setattr(registries.Registry, "has_died", False, raising=False)
        original = registry._place.append

        def append(line: str, after: int) -> bool:
            done = original(line, after)
            patch.setattr(registries.Registry, "has_died", True)
            return done

        patch.setattr(registry._place, "append", append)
        with pytest.raises(KeyboardInterrupt):
            promote(run, registry, wish())
    assert registry.state().current != registry.entries()[-1].version
    registry.settle()
    assert registry.state().current == registry.entries()[-1].version


def test_many_writers_make_one_sequence(registry: Registry) -> None:
    def write(name: str) -> None:
        for _ in range(10):
            Registry.open(registry.location).move(
                lambda state: state.with_current(name), who=name, what="promoted", version=name, why=""
            )

    threads = [threading.Thread(target=write, args=(f"writer{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = registry.entries()
    assert [entry.number for entry in entries] == list(range(1, 41))
    assert registry.state() == entries[-1].state
    assert len(registry.state().previous) == 39


def test_a_folder_of_something_else_is_left_alone(finished_run: Path, tmp_path: Path) -> None:
    assert not is_registry(finished_run)
    with pytest.raises(ConfigError, match="holds something else"):
        Registry.open_or_create(finished_run)
    with pytest.raises(ConfigError, match="is no registry"):
        Registry.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_gates_of_the_registry_hold_for_everybody(registry: Registry, make_run: Callable[[int], Path]) -> None:
    (Path(registry.location) / "gates.yaml").write_text(SHUT)
    verdict = promote(make_run(3), registry, Wish("ada"))
    assert (verdict.passed, verdict.gates_from) == (False, "the registry")


def test_weights_that_are_not_the_cards_are_not_registered(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    run = make_run(3)
    path = run / "student" / "student.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not those of its card"):
        promote(run, registry, wish())
    assert registry.versions() == []
    assert not (Path(registry.location) / "audit.jsonl").exists()


def test_what_a_site_found_is_a_figure(
    registry: Registry, make_run: Callable[[int], Path], wish: Callable[..., Wish]
) -> None:
    run = make_run(3)
    told = [{"site": name, "round": 3, "accuracy": share} for name, share in (("a", 91.0), ("b", 40.0))]
    (run / "sites.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told) + '{"torn')
    verdict = promote(run, registry, wish("offline: {worst_site_accuracy: {at_least: 50}}"))
    assert [check.value for check in verdict.checks] == ["40.00 %"]
    assert not verdict.passed
