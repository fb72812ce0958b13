"""Runs in object storage: whatever breaks between two uploads, no saved round is lost and the run goes on."""

import json
import logging
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from fedppd_ray.config.schema import Config
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.runs import export, remote
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.remote import Mirror, absolute, is_url, open_to_read, open_to_train, read_file
from fedppd_ray.runs.store import RunStore

ROUNDS = 3


class Killed(BaseException):
    """The process is gone: nothing may clean up after it."""


class Bucket:
    """fsspec's in-memory files as an object storage, which fails at its k-th change as told."""

    def __init__(self) -> None:
        self._files = MemoryFileSystem()
        self.empty()

    def empty(self) -> None:
        self._root = f"/{uuid.uuid4()}"  # the files of all instances are one
        self.changes: list[tuple[str, str]] = []
        self.fail: Callable[[int], BaseException | None] = lambda _step: None
        self.fail_reading: Callable[[], BaseException | None] = lambda: None
        self.steps = 0
        self.pauses: list[float] = []

    def _change(self, kind: str, path: str) -> None:
        self.steps += 1
        error = self.fail(self.steps)
        if error is not None:
            raise error
        self.changes.append((kind, path))

    def _read(self) -> None:
        error = self.fail_reading()
        if error is not None:
            raise error

    def put_file(self, source: str, path: str) -> None:
        self._change("put", path)
        self._files.pipe_file(f"{self._root}/{path}", Path(source).read_bytes())

    def rm_file(self, path: str) -> None:
        self._change("rm", path)
        self._files.rm_file(f"{self._root}/{path}")

    def cat_file(self, path: str) -> bytes:
        self._read()
        content: bytes = self._files.cat_file(f"{self._root}/{path}")
        return content

    def find(self, path: str) -> list[str]:
        self._read()
        return [name.removeprefix(f"{self._root}/") for name in self._files.find(f"{self._root}/{path}")]

    def write(self, path: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{path}", content)

    def content(self) -> dict[str, bytes]:
        return {name: self.cat_file(name) for name in self.find("bucket")}


URL = "s3://bucket/some/run"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The storage behind every URL. Nobody sleeps between attempts; the seconds are noted."""
    storage = Bucket()
    monkeypatch.setattr(remote, "connect", lambda url: Mirror(url, url[5:], storage, storage.pauses.append))
    return storage


@pytest.fixture(scope="module")
def config(tiny: Callable[..., Config]) -> Config:
    return tiny(federation={"rounds": 9}, checkpoint={"keep": 1})


@pytest.fixture(scope="module")
def student(config: Config) -> FlatModel:
    method = build_method(config)
    return method.student(method.initial_models())


def state_of(round_id: int) -> GlobalState:
    generator = np.random.default_rng(round_id)
    return GlobalState(round_id, {"teacher": generator.normal(size=50).astype(np.float32)})


def record_of(round_id: int) -> dict[str, Any]:
    return {"round": round_id, "accuracy": 10.0 + round_id, "failures": []}


def train(config: Config, student: FlatModel, accepted: list[int], rounds: int = ROUNDS) -> None:
    """What a training does with its run, as on a retried cluster: start or resume, then round after round."""
    with open_to_train(URL) as run:
        store = RunStore(run.folder, run.mirror)
        start = None
        if store.exists():
            start = store.resume(config)
        else:
            store.create(config)
        first = start.round + 1 if start else 1
        assert first - 1 >= max(accepted, default=0), "a saved round is lost"
        if start is not None:
            assert start.models["teacher"].tobytes() == state_of(start.round).models["teacher"].tobytes()
        (store.folder / "clients.json").write_text('{"clients": []}')
        for round_id in range(first, rounds + 1):
            export_student(store.folder, config, round_id, student, {"accuracy": 1.0}, None)
            store.save(state_of(round_id), config, record_of(round_id))
            accepted.append(round_id)


@pytest.fixture
def whole(config: Config, student: FlatModel, bucket: Bucket) -> tuple[dict[str, bytes], int]:
    """What an undisturbed run leaves, and in how many changes."""
    train(config, student, [])
    assert bucket.pauses == []
    found, steps = bucket.content(), bucket.steps
    bucket.empty()
    return found, steps


# ---- the order


def test_what_vouches_for_a_file_comes_after_it_and_old_rounds_go_last(
    config: Config, student: FlatModel, bucket: Bucket
) -> None:
    train(config, student, [], rounds=2)
    assert [(kind, path.removeprefix("bucket/some/run/")) for kind, path in bucket.changes] == [
        ("put", "config.yaml"),
        ("put", "clients.json"),
        ("put", "student/student.safetensors"),
        ("put", "student/model.json"),
        ("put", "checkpoints/round-000001/state.safetensors"),
        ("put", "checkpoints/round-000001/manifest.json"),
        ("put", "metrics.jsonl"),
        ("put", "student/student.safetensors"),
        ("put", "student/model.json"),
        ("put", "checkpoints/round-000002/state.safetensors"),
        ("put", "checkpoints/round-000002/manifest.json"),
        ("put", "metrics.jsonl"),
        ("rm", "checkpoints/round-000001/manifest.json"),
        ("rm", "checkpoints/round-000001/state.safetensors"),
    ]


def test_a_round_without_evaluation_does_not_upload_the_old_student_again(
    config: Config, student: FlatModel, bucket: Bucket
) -> None:
    with open_to_train(URL) as run:
        store = RunStore(run.folder, run.mirror)
        store.create(config)
        export_student(store.folder, config, 1, student, {}, None)
        store.save(state_of(1), config, record_of(1))
        store.save(state_of(2), config, record_of(2))
    assert [path for kind, path in bucket.changes if kind == "put" and "student" in path] == [
        "bucket/some/run/student/student.safetensors",
        "bucket/some/run/student/model.json",
    ]


# ---- failures at every point


def test_a_process_killed_before_any_change_leaves_a_run_that_resumes_to_the_same_bits(
    config: Config, student: FlatModel, bucket: Bucket, whole: tuple[dict[str, bytes], int]
) -> None:
    expected, steps = whole
    assert steps > 6 * ROUNDS
    for fatal in range(1, steps + 1):
        bucket.empty()
        bucket.fail = lambda step, fatal=fatal: Killed() if step == fatal else None  # type: ignore[misc]
        accepted: list[int] = []
        with pytest.raises(Killed):
            train(config, student, accepted)
        train(config, student, accepted)
        assert same_run(bucket.content(), expected), fatal


def test_a_process_killed_again_and_again_comes_to_the_same_bits(
    config: Config, student: FlatModel, bucket: Bucket, whole: tuple[dict[str, bytes], int]
) -> None:
    """Every ninth change: resumptions are killed too, and each attempt comes a little further."""
    bucket.fail = lambda step: Killed() if step % 9 == 0 else None
    accepted: list[int] = []
    kills = 0
    while True:
        try:
            train(config, student, accepted)
            break
        except Killed:
            kills += 1
            assert kills < 50
    assert kills > 2
    assert same_run(bucket.content(), whole[0])


def same_run(found: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """All files alike; old checkpoints, or halves of them, may be left where their removal was interrupted."""
    left = set(found) - set(expected)
    return all(found[name] == content for name, content in expected.items()) and all(
        re.search(rf"/checkpoints/round-00000[1-{ROUNDS - 1}]/", name) for name in left
    )


def test_storage_that_fails_at_any_point_stops_the_run_with_what_to_do_and_it_resumes(
    config: Config, student: FlatModel, bucket: Bucket, whole: tuple[dict[str, bytes], int]
) -> None:
    expected, steps = whole
    for first in range(2, steps + 1):
        bucket.empty()
        bucket.fail = lambda step, first=first: OSError(5, "broken") if step >= first else None  # type: ignore[misc]
        accepted: list[int] = []
        if first > steps - 2:  # removing an old checkpoint: the round is saved, and the run goes on
            train(config, student, accepted)
        else:
            with pytest.raises(CheckpointError) as caught:
                train(config, student, accepted)
            missed = max(accepted, default=0) + 1
            assert re.fullmatch(
                rf"round {missed} could not be saved \(s3://bucket/some/run: OSError: .*broken\); "
                r"the last saved round is intact: .*--resume",
                str(caught.value),
            )
        bucket.fail = lambda _step: None
        train(config, student, accepted)
        assert same_run(bucket.content(), expected), first


def test_errors_that_pass_are_waited_out_at_any_point(
    config: Config, student: FlatModel, bucket: Bucket, whole: tuple[dict[str, bytes], int]
) -> None:
    expected, steps = whole
    for bad in range(1, steps + 1):
        bucket.empty()
        bucket.fail = lambda step, bad=bad: TimeoutError("slow") if step in (bad, bad + 1) else None  # type: ignore[misc]
        train(config, student, [])
        assert len(bucket.pauses) == 2
        assert bucket.pauses[0] < bucket.pauses[1]
        assert bucket.content() == expected


def test_storage_that_stays_away_is_given_up_after_a_minute(config: Config, student: FlatModel, bucket: Bucket) -> None:
    bucket.fail = lambda step: ConnectionError("refused") if step > 1 else None
    with pytest.raises(CheckpointError, match=r"cannot be reached .*AWS_ENDPOINT_URL"):
        train(config, student, [])
    assert bucket.pauses == list(remote._PUSH_PAUSES)
    assert 30 < sum(bucket.pauses) < 90


def test_a_refusal_is_not_tried_again(config: Config, student: FlatModel, bucket: Bucket) -> None:
    bucket.fail = lambda _step: PermissionError("Access Denied")
    with pytest.raises(CheckpointError, match=r"access denied \(Access Denied\); check AWS_ACCESS_KEY_ID"):
        train(config, student, [])
    assert bucket.pauses == []


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(
    config: Config,
    student: FlatModel,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_path: str) -> None:
        raise PermissionError("no right to delete")

    monkeypatch.setattr(logging.getLogger("fedppd_ray"), "propagate", True)
    monkeypatch.setattr(bucket, "rm_file", refuse, raising=False)
    accepted: list[int] = []
    train(config, student, accepted)
    assert accepted == [1, 2, 3]
    assert "an old checkpoint stays" in caplog.text


# ---- damage


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    tiny: Callable[..., Config], student: FlatModel, bucket: Bucket, name: str
) -> None:
    config = tiny(federation={"rounds": 9}, checkpoint={"keep": 2})
    train(config, student, [], rounds=3)
    bucket.write(f"bucket/some/run/checkpoints/round-000003/{name}", b"damaged")
    again: list[int] = []
    train(config, student, again, rounds=5)
    assert again == [3, 4, 5]
    assert sorted(path.split("/")[4] for path in bucket.content() if path.endswith("manifest.json")) == [
        "round-000004",
        "round-000005",
    ]


def test_keys_that_are_no_files_of_a_run_are_left_where_they_are(
    config: Config, student: FlatModel, bucket: Bucket
) -> None:
    train(config, student, [], rounds=1)
    root = "bucket/some/run"
    names = ("../../evil", "checkpoints/../../evil", "checkpoints/round-000009/other", "student/../x", "notes.txt")
    find = bucket.find

    def crafted(path: str) -> list[str]:
        return [*find(path), *(f"{root}/{name}" for name in names)]

    bucket.find = crafted  # type: ignore[method-assign]
    with open_to_train(URL) as run:
        found = sorted(path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file())
    assert found == [
        "checkpoints/round-000001/manifest.json",
        "checkpoints/round-000001/state.safetensors",
        "config.yaml",
        "metrics.jsonl",
    ]


# ---- starting, reading


@pytest.mark.usefixtures("bucket")
def test_a_second_run_at_the_same_url_is_refused_by_its_url(config: Config, student: FlatModel) -> None:
    train(config, student, [], rounds=1)
    with (
        open_to_train(URL) as run,
        pytest.raises(CheckpointError, match=r"^s3://bucket/some/run already holds a run; .*--resume"),
    ):
        RunStore(run.folder, run.mirror).create(config)


@pytest.mark.usefixtures("bucket")
def test_resuming_nothing_is_refused_by_its_url(config: Config) -> None:
    with open_to_train(URL) as run, pytest.raises(CheckpointError, match=r"^s3://bucket/some/run holds no run"):
        RunStore(run.folder, run.mirror).resume(config)


def test_a_refused_resumption_changes_nothing(
    config: Config, student: FlatModel, tiny: Callable[..., Config], bucket: Bucket
) -> None:
    train(config, student, [], rounds=3)
    before = bucket.content()
    for other in (tiny(seed=4), tiny(federation={"rounds": 2}, checkpoint={"keep": 1})):
        with open_to_train(URL) as run, pytest.raises(CheckpointError):
            RunStore(run.folder, run.mirror).resume(other)
    assert bucket.content() == before


@pytest.mark.usefixtures("bucket")
def test_the_local_folder_is_private_and_goes_with_the_run() -> None:
    with open_to_train(URL) as run:
        assert run.folder.stat().st_mode & 0o077 == 0
    assert not run.folder.exists()


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    for location in (tmp_path / "run", str(tmp_path / "run")):
        with open_to_train(location) as run:
            assert (run.folder, run.mirror) == (tmp_path / "run", None)
            assert run.name_of(run.folder / "report.html") == f"{tmp_path}/run/report.html"


@pytest.mark.usefixtures("bucket")
def test_reading_needs_no_checkpoint(config: Config, student: FlatModel) -> None:
    train(config, student, [], rounds=2)
    with open_to_read(URL) as run:
        assert sorted(path.name for path in run.folder.iterdir()) == ["clients.json", "config.yaml", "metrics.jsonl"]
        assert RunStore(run.folder).config() == config
    card, model = read_student(URL)
    assert card == read_card(URL)
    assert model.export().tobytes() == student.export().tobytes()


@pytest.mark.usefixtures("bucket")
def test_what_is_not_there_is_named_by_its_url() -> None:
    with pytest.raises(CheckpointError, match=r"^s3://bucket/some/run is no run folder"), open_to_read(URL):
        pass
    with pytest.raises(CheckpointError, match=r"^s3://bucket/some/run/student/model\.json: cannot be read \(No such"):
        read_student(URL)
    with pytest.raises(FileNotFoundError):
        read_file(URL, "config.yaml")


def test_a_reader_between_the_two_uploads_of_an_export_reads_again(
    config: Config, student: FlatModel, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config, student, [], rounds=1)
    folder = "bucket/some/run/student"
    other = build_method(config).student({"student": student.export() + 1})
    export_student(tmp_path, config, 2, other, {}, None)
    card = (tmp_path / "student" / "model.json").read_bytes()
    bucket.write(f"{folder}/student.safetensors", (tmp_path / "student" / "student.safetensors").read_bytes())
    waited: list[float] = []

    def uploaded_meanwhile(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            bucket.write(f"{folder}/model.json", card)

    monkeypatch.setattr(export.time, "sleep", uploaded_meanwhile)
    found, model = read_student(URL)
    assert (found["round"], len(waited)) == (2, 2)
    assert model.export().tobytes() == other.export().tobytes()
    bucket.write(f"{folder}/model.json", json.dumps({**json.loads(card), "sha256": "0" * 64}).encode())
    with pytest.raises(CheckpointError, match=r"^s3://.*student\.safetensors: does not match the sha256"):
        read_student(URL)
    assert sum(waited) < 10


def test_a_reader_gives_up_within_seconds(bucket: Bucket) -> None:
    bucket.fail_reading = lambda: ConnectionError("refused")
    with pytest.raises(CheckpointError, match="cannot be reached"), open_to_read(URL):
        pass
    assert sum(bucket.pauses) < 5


def test_a_listing_that_fails_is_not_taken_for_an_empty_run(bucket: Bucket) -> None:
    bucket.fail_reading = lambda: FileNotFoundError("The specified bucket does not exist")
    with pytest.raises(CheckpointError, match="no such bucket"), open_to_train(URL):
        pass


# ---- locations


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/x", "file:///tmp/x"])
def test_urls_are_told_from_paths(url: str) -> None:
    assert is_url(url)
    assert absolute(url) == url


@pytest.mark.parametrize("path", ["runs/demo", "/runs/demo", "C:/runs", "a:b", "", "./s3"])
def test_paths_are_told_from_urls(path: str) -> None:
    assert not is_url(path)
    assert Path(absolute(path)).is_absolute()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("gs://bucket/run", "give a path or s3://bucket/prefix"),
        ("file:///tmp/run", "give a path or s3://bucket/prefix"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        (Path("s3://bucket/run"), "neither a path nor a URL"),
    ],
)
def test_a_location_that_cannot_be_used_is_refused_in_one_line(location: str | Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught, open_to_train(location):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["fsspec", "s3fs"])
def test_without_the_extra_a_url_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote._s3_files.cache_clear()
    # fsspec remembers what it has imported once, in an earlier test say.
    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"install fedppd-ray\[s3\]"), open_to_train(URL):
        pass
