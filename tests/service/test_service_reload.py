"""A new export takes the old one's place; a broken one does not."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from fedppd_ray.errors import CheckpointError
from fedppd_ray.runs.files import sha256
from fedppd_ray.runs.signature import TRUSTED, Key, sign_export, trust
from serve.batching import Batcher
from serve.metrics import Metrics
from serve.predictor import Predictor, _public
from serve.settings import Settings
from serve.student import ServedStudent
from tests.service.conftest import Client
from tests.service.exports import export_again

ZERO = np.zeros((1, 1, 28, 28), np.uint8)


def predictor_of(run: Path) -> Predictor:
    return Predictor(Settings(run=str(run), watch=True), Metrics())


def test_a_new_export_is_swapped_in(own_run: Path) -> None:
    predictor = predictor_of(own_run)
    before = predictor.current
    assert predictor.refresh() is False
    version = export_again(own_run, 2)
    assert predictor.refresh() is True
    assert predictor.current.version == version != before.version
    assert (predictor.state.reloads, predictor.state.error) == (1, None)
    # A request that began with the old student ends with it.
    assert np.isfinite(before.log_probabilities(ZERO)).all()


def test_where_a_key_is_trusted_only_what_it_signed_is_served_and_swapped_in(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = Key.make(tmp_path / "coordinator.key"), Key.make(tmp_path / "other.key")
    monkeypatch.setenv(TRUSTED, "")  # put back at the end
    trust(key.public)
    with pytest.raises(CheckpointError, match=r"is not signed: .*fedppd keys sign"):
        predictor_of(own_run)
    sign_export(own_run, key)
    predictor = predictor_of(own_run)
    first = predictor.current.version
    monkeypatch.setenv(TRUSTED, "")
    version = export_again(own_run, 2)
    trust(key.public)
    for says in ("does not bear out its signature", f"is signed by {other.public}"):
        assert predictor.refresh() is False
        assert says in str(predictor.state.error)
        assert predictor.current.version == first
        sign_export(own_run, other)
    sign_export(own_run, key)
    assert predictor.refresh() is True
    assert predictor.current.version == version


def broken_weights(run: Path) -> None:
    path = run / "student" / "student.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_card(run: Path, **entries: Any) -> None:
    path = run / "student" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_abstention(run: Path, **entries: Any) -> None:
    change_card(run, abstention=json.loads((run / "student" / "model.json").read_text())["abstention"] | entries)


def not_finite(run: Path) -> None:
    """Sound files, whose predictions are not numbers."""
    path = run / "student" / "student.safetensors"
    tensors = load_file(path)
    tensors["out.bias"] = np.full_like(tensors["out.bias"], np.nan)
    content = save(tensors)
    path.write_bytes(content)
    change_card(run, sha256=sha256(content))


BREAKAGES: dict[str, Any] = {
    "cut card": lambda run: (run / "student" / "model.json").write_text("{"),
    "no card": lambda run: (run / "student" / "model.json").unlink(),
    "other format": lambda run: change_card(run, format=99),
    "unknown network": lambda run: change_card(run, network="gpt"),
    "other network": lambda run: change_card(run, network="mnist_teacher"),
    "classes are no list": lambda run: change_card(run, classes=3),
    "no input": lambda run: change_card(run, input={}),
    "odd threshold": lambda run: change_card(run, abstention={"coverage": 0.9}),
    "round is text": lambda run: change_card(run, round="seven"),
    "round is a truth value": lambda run: change_card(run, round=True),
    "round is missing": lambda run: change_card(run, round=None),
    "risk table is empty": lambda run: change_abstention(run, table=[]),
    "risk table stops short of 1": lambda run: change_abstention(
        run, table=[{"coverage": 0.9, "threshold": 1.0, "risk": 1.0}]
    ),
    "risk is text": lambda run: change_abstention(run, table=[{"coverage": 1.0, "threshold": 1.0, "risk": "low"}]),
    "threshold is text": lambda run: change_abstention(run, threshold="low"),
    "no class names": lambda run: change_card(run, classes=None),
    "a class name is null": lambda run: change_card(run, classes=[None, *"123456789"]),
    "a class name is a number": lambda run: change_card(run, classes=list(range(10))),
    "name is null": lambda run: change_card(run, name=None),
    "metrics are a list": lambda run: change_card(run, metrics=[]),
    "a metric is text": lambda run: change_card(run, metrics={"accuracy": "good"}),
    "no deviation": lambda run: change_card(run, normalisation={"mean": [0.1], "std": [0.0]}),
    "too few deviations": lambda run: change_card(run, normalisation={"mean": [0.1], "std": []}),
    "width is text": lambda run: change_card(run, input={"channels": 1, "height": 28, "width": "28"}),
    "digest of something else": lambda run: change_card(run, sha256="0" * 64),
    "cut weights": lambda run: (broken_weights(run), change_card(run, round=7)),
    "weights that are not finite": not_finite,
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_export_is_refused_and_the_old_one_serves_on(
    own_run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    predictor = predictor_of(own_run)
    before = predictor.current
    BREAKAGES[name](own_run)
    assert predictor.refresh() is False
    assert predictor.refresh() is False
    assert predictor.current is before
    assert predictor.state.refused == 1, "one broken export is one refusal, however often it is looked at"
    assert predictor.describe()["reload"]["error"]
    assert "fedppd_reload_failing 1.0" in predictor.metrics.text().decode()
    assert 'fedppd_reloads_total{result="refused"} 1.0' in predictor.metrics.text().decode()


@pytest.mark.parametrize("name", ["cut card", "cut weights", "other network", "round is text"])
def test_the_reason_names_no_folder_and_shows_no_stack(
    open_client: Client, own_run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone may read `/model`."""
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    client = open_client(own_run, watch=True, poll_seconds=0.05)
    BREAKAGES[name](own_run)
    deadline = time.monotonic() + 20
    while (reason := client.get("/model").json()["reload"]["error"]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "student" in reason
    assert str(own_run.parent) not in reason
    assert len(reason.splitlines()) == 1


def test_native_stack_frames_and_paths_are_left_out() -> None:
    error = RuntimeError("/a/b c/run/student/x: bad tensor at /usr/lib/torch/csrc/x.cpp:12\nframe #0: c10::Error + 0x5")
    assert _public(error, "/a/b c/run") == "student/x: bad tensor at …/x.cpp:12"


def test_a_card_of_a_newer_version_may_say_more(own_run: Path) -> None:
    predictor = predictor_of(own_run)
    change_card(own_run, watermark={"kind": "none"}, round=9)
    change_abstention(own_run, score="entropy")
    assert predictor.refresh() is True
    assert predictor.current.card["watermark"] == {"kind": "none"}


def test_a_mended_export_is_taken(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    predictor = predictor_of(own_run)
    path = own_run / "student" / "student.safetensors"
    version = export_again(own_run, 2)
    sound = path.read_bytes()
    path.write_bytes(b"")
    assert predictor.refresh() is False
    path.write_bytes(sound)
    assert predictor.refresh() is True
    assert predictor.current.version == version
    assert predictor.state.error is None


def test_a_reader_between_the_two_renames_looks_again(own_run: Path) -> None:
    """The card is new, its weights arrive a moment later."""
    predictor = predictor_of(own_run)
    path = own_run / "student" / "student.safetensors"
    version = export_again(own_run, 2)
    sound = path.read_bytes()
    path.write_bytes(b"")
    threading.Timer(0.3, lambda: path.write_bytes(sound)).start()
    assert predictor.refresh() is True
    assert predictor.current.version == version
    assert predictor.state.refused == 0


def test_serving_does_not_start_on_a_broken_export(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.predictor._PAUSE_SECONDS", 0.001)
    broken_weights(own_run)
    with pytest.raises(CheckpointError):
        predictor_of(own_run)


def test_watching_swaps_by_itself(open_client: Client, own_run: Path) -> None:
    client = open_client(own_run, watch=True, poll_seconds=0.05)
    version = export_again(own_run, 2)
    deadline = time.monotonic() + 20
    while client.get("/model").json()["version"] != version:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer = client.post("/predict", json={"instances": [np.zeros((28, 28)).tolist()]}).json()
    assert answer["model"]["version"] == version


def test_waiting_requests_share_a_pass_and_keep_their_student(own_run: Path) -> None:
    old = ServedStudent.load(own_run, 10)
    export_again(own_run, 2)
    new = ServedStudent.load(own_run, 10)
    sizes: list[int] = []

    async def ask() -> list[Any]:
        batcher = Batcher(512, 1, sizes.append)
        rows = np.random.default_rng(0).integers(0, 256, (6, 1, 28, 28), np.uint8)
        jobs = [batcher.log_probabilities(old, rows[:2]), batcher.log_probabilities(old, rows[2:3])]
        jobs += [batcher.log_probabilities(new, rows[3:])]
        answers = await asyncio.gather(*jobs)
        np.testing.assert_allclose(np.concatenate(answers[:2]), old.log_probabilities(rows[:3]), atol=1e-5)
        np.testing.assert_allclose(answers[2], new.log_probabilities(rows[3:]), atol=1e-5)
        batcher.close()
        return answers

    asyncio.run(ask())
    assert sizes == [3, 3]


def test_a_caller_who_left_holds_nobody_up(digits_run: Path) -> None:
    student = ServedStudent.load(digits_run, 10)

    async def ask() -> None:
        batcher = Batcher(512, 1, lambda _: None)
        leaving = asyncio.ensure_future(batcher.log_probabilities(student, ZERO))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await batcher.log_probabilities(student, ZERO)).shape == (1, 10)
        batcher.close()

    asyncio.run(ask())


def test_a_failing_pass_is_its_callers_error_and_no_one_elses(digits_run: Path) -> None:
    student = ServedStudent.load(digits_run, 10)
    wrong = np.zeros((1, 1, 5, 5), np.uint8)

    async def ask() -> None:
        batcher = Batcher(512, 1, lambda _: None)
        with pytest.raises(RuntimeError):
            await batcher.log_probabilities(student, wrong)
        assert (await batcher.log_probabilities(student, ZERO)).shape == (1, 10)
        batcher.close()

    asyncio.run(ask())


def test_a_large_request_does_not_hold_up_a_small_one(digits_run: Path) -> None:
    student = ServedStudent.load(digits_run, 10_000)

    async def ask() -> None:
        batcher = Batcher(100, 1, lambda _: None)
        large = asyncio.ensure_future(batcher.log_probabilities(student, np.zeros((4000, 1, 28, 28), np.uint8)))
        await asyncio.sleep(0.01)
        await batcher.log_probabilities(student, ZERO)
        assert not large.done()
        assert len(await large) == 4000
        batcher.close()

    asyncio.run(ask())
