"""What survives a power cut, at every moment: by a file system that notes what was written, renamed, synced, removed.

A disk keeps what was synced, and is free to keep or lose the rest. So each step of a write is followed by three looks
at what a machine may find when it starts again: every rename and removal done but no unsynced byte there; nothing done
that was not synced; and the worst mixture, unsynced removals done and unsynced names not.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.files import write_atomically
from fedppd_ray.runs.store import RunStore

Tiny = Callable[..., Config]
Look = Callable[[Path], None]
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names open files by /proc")


@dataclass
class Disk:
    """Watches all below `root`. `look` is called with each state that a power cut might leave, after every step."""

    root: Path
    aside: Path  # what is removed is kept there, so that no inode's number is used twice
    look: Look | None = None
    log: list[tuple[str, str]] = field(default_factory=list)
    _content: dict[int, bytes] = field(default_factory=dict)  # of files, when last synced
    _names: dict[int, dict[str, int]] = field(default_factory=dict)  # of folders, when last synced

    def name(self, path: Any) -> str:
        return Path(path).relative_to(self.root).as_posix()

    def watches(self, path: Any) -> bool:
        return Path(path).is_relative_to(self.root)

    def synced(self, path: Path) -> None:
        self.log.append(("sync", self.name(path)))
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._content[path.stat().st_ino] = path.read_bytes()
        self._looks()

    def moved(self, source: Path, target: Path) -> None:
        self.log.append(("rename", self.name(target)))
        self._looks()

    def removed(self, path: Path) -> None:
        self.log.append(("remove", self.name(path)))
        self._looks()

    def keep(self, path: Path) -> None:
        if path.is_file():
            os.link(path, self.aside / f"kept-{len(list(self.aside.iterdir()))}")

    def _looks(self) -> None:
        if self.look is not None:
            for copy in self.after_power_cut():
                self.look(copy)

    def after_power_cut(self) -> Iterator[Path]:
        """Copies of what may be found, one after the other."""
        for state in (self._all_done, self._nothing_done, self._worst):
            copy = self.aside / "after"
            copy.mkdir()
            state(self.root, copy)
            yield copy
            REMOVE(copy)

    def _all_done(self, live: Path, copy: Path) -> None:
        for entry in live.iterdir():
            if entry.is_dir():
                (copy / entry.name).mkdir()
                self._all_done(entry, copy / entry.name)
            else:
                kept, now = self._content.get(entry.stat().st_ino, b""), entry.read_bytes()
                (copy / entry.name).write_bytes(kept if now.startswith(kept) else b"")

    def _nothing_done(self, live: Path, copy: Path) -> None:
        self._from_names(live.stat().st_ino, None, copy)

    def _worst(self, live: Path, copy: Path) -> None:
        self._from_names(live.stat().st_ino, live, copy)

    def _from_names(self, folder: int, live: Path | None, copy: Path) -> None:
        for name, inode in self._names.get(folder, {}).items():
            below = live / name if live else None
            if below is not None and not below.exists():
                continue
            if inode in self._content:
                (copy / name).write_bytes(self._content[inode])
            elif inode in self._names:
                (copy / name).mkdir()
                self._from_names(inode, below, copy / name)
            else:  # a name of what was never synced itself
                (copy / name).touch()


REMOVE = shutil.rmtree


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    root, aside = tmp_path / "disk", tmp_path / "aside"
    root.mkdir()
    aside.mkdir()
    watched = Disk(root, aside)
    sync, rename, unlink = os.fsync, os.rename, os.unlink

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if watched.watches(path):
            watched.synced(path)

    def moved(source: Any, target: Any, **rest: Any) -> None:
        if watched.watches(target) and Path(target).exists():
            watched.keep(Path(target))
        rename(source, target, **rest)
        if watched.watches(target):
            watched.moved(Path(source), Path(target))

    def removed(path: Any, **rest: Any) -> None:
        if watched.watches(path):
            watched.keep(Path(path))
        unlink(path, **rest)

    def tree(path: Any, **rest: Any) -> None:
        if not watched.watches(path):
            REMOVE(path, **rest)
            return
        rename(path, aside / f"tree-{len(list(aside.iterdir()))}")
        watched.removed(Path(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", moved)
        patch.setattr(os, "replace", moved)
        patch.setattr(os, "unlink", removed)
        patch.setattr(shutil, "rmtree", tree)
        yield watched


def state_of(round_id: int) -> GlobalState:
    vector = np.random.default_rng(round_id).normal(size=40).astype(np.float32)
    return GlobalState(round_id, {"teacher": vector, "student": 2 * vector})


def record_of(round_id: int) -> dict[str, Any]:
    return {"round": round_id, "accuracy": float(round_id), "clients": 3}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith(".")]


# ---- one file


def test_a_file_is_synced_before_it_takes_its_name_and_its_folder_after(disk: Disk) -> None:
    for content in (b"first", b"second, and longer"):
        disk.log.clear()
        write_atomically(disk.root / "file", content)
        assert [step for step, _ in disk.log] == ["sync", "rename", "sync"]
        assert disk.log[1:] == [("rename", "file"), ("sync", ".")]
        assert (disk.root / "file").read_bytes() == content
        assert hidden(disk.root) == []


def test_a_file_is_old_or_new_whenever_the_power_goes(disk: Disk) -> None:
    write_atomically(disk.root / "file", b"old")
    found: set[bytes] = set()
    disk.look = lambda after: found.add((after / "file").read_bytes())
    write_atomically(disk.root / "file", b"the new one")
    assert found == {b"old", b"the new one"}


@pytest.mark.parametrize("fails", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OSError, match="No space"):
            write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


# ---- rounds


def began(log: list[tuple[str, str]], step: str, name: str) -> int:
    """Where the step first happened; fails if it never did."""
    return next(place for place, one in enumerate(log) if one[0] == step and one[1].endswith(name))


def test_a_checkpoints_state_is_there_before_its_manifest_and_both_before_its_name(disk: Disk, tiny: Tiny) -> None:
    config, store = tiny(), RunStore(disk.root / "run")
    store.create(config)
    disk.log.clear()
    store.save(state_of(1), config, record_of(1))
    steps = [began(disk.log, "rename", name) for name in ("state.safetensors", "manifest.json", "round-000001")]
    assert steps == sorted(steps)
    folder = disk.log[steps[0]][1].rpartition("/")[0]
    assert disk.log[steps[1] + 1] == ("sync", folder)  # the folder's own names, before it gets its name
    assert disk.log[steps[2] + 1] == ("sync", "run/checkpoints")
    assert began(disk.log, "sync", "metrics.jsonl") > steps[2]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_saved_round_survives_a_power_cut_at_any_later_moment(disk: Disk, tiny: Tiny, keep: int) -> None:
    config = tiny(federation={"rounds": 9}, checkpoint={"keep": keep})
    store = RunStore(disk.root / "run")
    store.create(config)
    saved = 0
    looks = 0

    def look(after: Path) -> None:
        nonlocal looks
        looks += 1
        if saved:
            found = RunStore(after / "run").latest()
            assert found.round in (saved, saved + 1)
            assert all(np.array_equal(found.models[role], state_of(found.round).models[role]) for role in found.models)

    disk.look = look
    for round_id in range(1, 5):
        store.save(state_of(round_id), config, record_of(round_id))
        saved = round_id
    assert looks > 60
    removed = [name for step, name in disk.log if step == "remove"]
    assert removed == [f"run/checkpoints/round-{number:06d}" for number in range(1, 5 - keep)]
    assert hidden(disk.root) == []


def test_a_run_resumes_with_all_its_metrics_after_a_power_cut_between_rounds(disk: Disk, tiny: Tiny) -> None:
    config = tiny(federation={"rounds": 9})
    store = RunStore(disk.root / "run")
    store.create(config)
    for round_id in range(1, 4):
        store.save(state_of(round_id), config, record_of(round_id))

    for after in disk.after_power_cut():
        again = RunStore(after / "run")
        assert again.exists()
        resumed = again.resume(config)
        assert resumed is not None
        assert resumed.round == 3
        assert [line["round"] for line in again.history()] == [1, 2, 3]


def test_a_round_that_cannot_be_saved_leaves_nothing_half_done(
    disk: Disk, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store = tiny(), RunStore(disk.root / "run")
    store.create(config)
    store.save(state_of(1), config, record_of(1))
    real = os.rename

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "round-000002":
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(state_of(2), config, record_of(2))
    assert [path.name for path in (disk.root / "run/checkpoints").iterdir()] == ["round-000001"]
    assert [line["round"] for line in store.history()] == [1]


# ---- the exported student


@pytest.fixture
def exporting(disk: Disk, tiny: Tiny) -> Callable[[int], str]:
    """Exports a student of a round, another one each time; returns its version."""
    config, run = tiny(), disk.root / "run"
    method = build_method(config)
    RunStore(run).create(config)

    def export(round_id: int) -> str:
        student = method.student(method.initial_models())
        student.load(student.export() * np.float32(round_id))
        export_student(run, config, round_id, student, {"accuracy": 90.0}, None)
        return str(read_card(run)["version"])

    return export


def test_a_card_comes_after_the_weights_that_it_vouches_for(disk: Disk, exporting: Callable[[int], str]) -> None:
    for round_id in (1, 2):
        disk.log.clear()
        exporting(round_id)
        weights, card = (began(disk.log, "rename", name) for name in ("student.safetensors", "model.json"))
        assert disk.log[weights + 1] == ("sync", "run/student")
        assert disk.log[card + 1] == ("sync", "run/student")
        assert weights + 1 < card
        assert hidden(disk.root) == []


def test_no_power_cut_leaves_a_card_of_weights_that_are_not_there(disk: Disk, exporting: Callable[[int], str]) -> None:
    exporting(1)
    found: set[tuple[int, bool]] = set()

    def look(after: Path) -> None:
        round_id = read_card(after / "run")["round"]
        try:
            read_student(after / "run")
            sound = True
        except CheckpointError:
            sound = False
        found.add((round_id, sound))

    disk.look = look
    exporting(2)
    # Between the renames the old card has the new weights; a round that was not saved is exported again on resuming.
    assert found == {(1, True), (1, False), (2, True)}


def test_a_last_round_that_survives_has_its_student(disk: Disk, tiny: Tiny, train_run: Callable[..., Any]) -> None:
    """Resuming after the last round exports nothing, so its checkpoint must not outlive the student."""
    found: list[tuple[int, int]] = []

    def look(after: Path) -> None:
        try:
            saved = RunStore(after / "run").latest().round
        except CheckpointError:
            return
        found.append((saved, read_student(after / "run")[0]["round"] if saved == 2 else 0))

    disk.look = look
    train_run(tiny(federation={"rounds": 2}), disk.root / "run")
    assert (2, 2) in found
    assert all(exported == 2 for saved, exported in found if saved == 2)
