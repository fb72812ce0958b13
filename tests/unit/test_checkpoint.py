"""The run folder: written whole or not at all, read back bit for bit, damaged files never believed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedppd_ray.config.identity import config_hash
from fedppd_ray.config.schema import CheckpointConfig, Config
from fedppd_ray.errors import CheckpointError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.runs import store as store_module
from fedppd_ray.runs.export import export_student, read_card, read_student
from fedppd_ray.runs.files import sha256, write_atomically, write_json
from fedppd_ray.runs.store import RunStore

Tiny = Callable[..., Config]


def state_of(round_id: int) -> GlobalState:
    generator = np.random.default_rng(round_id)
    models = {role: generator.normal(size=size).astype(np.float32) for role, size in (("teacher", 50), ("student", 80))}
    models["teacher"][:3] = [np.float32(-0.0), np.finfo(np.float32).tiny, np.finfo(np.float32).max]
    return GlobalState(round_id, models)


def record_of(round_id: int) -> dict[str, Any]:
    return {"round": round_id, "accuracy": 12.5 + round_id, "failures": [], "seconds": 0.1}


@pytest.fixture
def config(tiny: Tiny) -> Config:
    return tiny(federation={"rounds": 9})


@pytest.fixture
def store(tmp_path: Path, config: Config) -> RunStore:
    store = RunStore(tmp_path / "run")
    store.create(config)
    return store


def save(store: RunStore, config: Config, *rounds: int) -> None:
    for round_id in rounds:
        store.save(state_of(round_id), config, record_of(round_id))


def checkpoints(store: RunStore) -> list[str]:
    return sorted(path.name for path in (store.folder / "checkpoints").iterdir())


def same(first: GlobalState | None, second: GlobalState) -> bool:
    return (
        first is not None
        and first.round == second.round
        and {role: vector.tobytes() for role, vector in first.models.items()}
        == {role: vector.tobytes() for role, vector in second.models.items()}
    )


def folder_of(store: RunStore, round_id: int) -> Path:
    return store.folder / "checkpoints" / f"round-{round_id:06d}"


def rounds_in_metrics(store: RunStore) -> list[int]:
    return [json.loads(line)["round"] for line in (store.folder / "metrics.jsonl").read_text().splitlines()]


# ---- round trip


def test_a_state_comes_back_bit_for_bit(store: RunStore, config: Config) -> None:
    save(store, config, 1)
    assert same(RunStore(store.folder).resume(config), state_of(1))
    assert same(store.latest(), state_of(1))


def test_a_run_without_a_finished_round_resumes_from_the_start(store: RunStore, config: Config) -> None:
    assert store.resume(config) is None
    with pytest.raises(CheckpointError, match="holds no finished round"):
        store.latest()


def test_the_configuration_comes_back(store: RunStore, config: Config) -> None:
    assert RunStore(store.folder).config() == config


def test_nothing_on_disk_is_a_pickle(store: RunStore, config: Config) -> None:
    save(store, config, 1)
    files = sorted(path for path in folder_of(store, 1).iterdir())
    assert [path.name for path in files] == ["manifest.json", "state.safetensors"]
    assert json.loads(files[0].read_text())["round"] == 1
    content = files[1].read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert set(json.loads(content[8 : 8 + header])) == {"teacher", "student"}


def test_the_manifest_says_what_the_checkpoint_is(store: RunStore, config: Config) -> None:
    save(store, config, 1)
    manifest = json.loads((folder_of(store, 1) / "manifest.json").read_text())
    assert manifest["config_hash"] == config_hash(config)
    assert manifest["config"]["seed"] == config.seed
    assert manifest["sha256"] == sha256((folder_of(store, 1) / "state.safetensors").read_bytes())
    assert manifest["record"] == record_of(1)


# ---- keeping


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_k_checkpoints_stay(tmp_path: Path, tiny: Tiny, keep: int) -> None:
    config = tiny(federation={"rounds": 9}, checkpoint={"keep": keep})
    store = RunStore(tmp_path / "run")
    store.create(config)
    save(store, config, 1, 2, 3, 4, 5)
    assert checkpoints(store) == [f"round-{number:06d}" for number in range(6 - keep, 6)]


def test_the_new_checkpoint_is_complete_before_an_old_one_goes(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(federation={"rounds": 9}, checkpoint={"keep": 1})
    store = RunStore(tmp_path / "run")
    store.create(config)
    save(store, config, 1)
    seen: list[bool] = []
    real = shutil.rmtree

    def watching(path: Path, **rest: Any) -> None:
        if Path(path).name == "round-000001":
            seen.append(same(RunStore(store.folder).latest(), state_of(2)))
        real(path, **rest)

    monkeypatch.setattr(store_module.shutil, "rmtree", watching)
    save(store, config, 2)
    assert seen == [True]


def test_a_disk_that_fails_leaves_the_last_round_intact(
    store: RunStore, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, config, 1, 2)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_checkpoint", full)
        with pytest.raises(CheckpointError, match=r"round 3 could not be saved .*No space left.*--resume"):
            save(store, config, 3)
    assert checkpoints(store) == ["round-000001", "round-000002"]
    assert same(store.resume(config), state_of(2))


# ---- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


DAMAGE: list[Any] = [
    pytest.param("state.safetensors", truncate, id="state cut short"),
    pytest.param("state.safetensors", flip, id="one bit of the state"),
    pytest.param("state.safetensors", Path.unlink, id="state missing"),
    pytest.param("state.safetensors", lambda path: path.write_bytes(b""), id="state empty"),
    pytest.param("manifest.json", truncate, id="manifest cut short"),
    pytest.param("manifest.json", Path.unlink, id="manifest missing"),
    pytest.param("manifest.json", lambda path: path.write_text("[]"), id="manifest a list"),
    pytest.param("manifest.json", lambda path: path.write_text('{"round": 3}'), id="manifest incomplete"),
    pytest.param("manifest.json", lambda path: path.write_bytes(b"\xff\xfe"), id="manifest no text"),
    pytest.param(
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 99')),
        id="manifest of a later format",
    ),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    store: RunStore, config: Config, name: str, damage: Callable[[Path], object]
) -> None:
    save(store, config, 1, 2, 3)
    damage(folder_of(store, 3) / name)
    assert same(store.resume(config), state_of(2))
    assert rounds_in_metrics(store) == [1, 2]
    save(store, config, 3)
    assert same(store.resume(config), state_of(3))
    assert rounds_in_metrics(store) == [1, 2, 3]


def test_damaged_checkpoints_of_later_rounds_do_not_crowd_out_new_ones(store: RunStore, config: Config) -> None:
    save(store, config.model_copy(update={"checkpoint": CheckpointConfig(keep=4)}), 1, 2, 3, 4, 5)
    for round_id in (3, 4, 5):
        truncate(folder_of(store, round_id) / "state.safetensors")
    assert same(store.resume(config), state_of(2))
    save(store, config, 3)
    assert same(store.resume(config), state_of(3))
    assert checkpoints(store) == ["round-000002", "round-000003"]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_silently_started_again(store: RunStore, config: Config) -> None:
    save(store, config, 1, 2, 3)
    for round_id in (2, 3):  # all that are kept
        truncate(folder_of(store, round_id) / "state.safetensors")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        store.resume(config)
    assert rounds_in_metrics(store) == [1, 2, 3]


def test_a_run_whose_checkpoints_are_gone_keeps_its_metrics(store: RunStore, config: Config) -> None:
    """Rounds are hours of work; their lines must not be wiped by a second start."""
    save(store, config, 1, 2)
    shutil.rmtree(store.folder / "checkpoints")
    with pytest.raises(CheckpointError, match=r"its checkpoints are gone; remove .* another --out"):
        store.resume(config)
    assert rounds_in_metrics(store) == [1, 2]


def test_a_run_that_failed_before_its_first_round_may_be_mended(store: RunStore, config: Config) -> None:
    other = config.model_copy(update={"seed": config.seed + 1})
    assert store.resume(other) is None
    assert store.config().seed == other.seed
    save(store, other, 1)
    with pytest.raises(CheckpointError, match="another config"):
        store.resume(config)


def test_an_unfinished_checkpoint_is_swept_away(store: RunStore, config: Config) -> None:
    save(store, config, 1)
    half = store.folder / "checkpoints" / ".new-abc"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert same(store.resume(config), state_of(1))
    assert checkpoints(store) == ["round-000001"]


# ---- metrics


def test_metrics_beyond_the_checkpoint_are_cut_back(store: RunStore, config: Config) -> None:
    save(store, config, 1, 2)
    with (store.folder / "metrics.jsonl").open("a") as handle:
        handle.write(json.dumps(record_of(3)) + "\n")
    store.resume(config)
    assert store.history() == [record_of(1), record_of(2)]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_mended_from_the_manifest(store: RunStore, config: Config, cut: int) -> None:
    save(store, config, 1, 2)
    path = store.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    store.resume(config)
    assert store.history() == [record_of(1), record_of(2)]
    assert path.read_bytes().endswith(b"}\n")


def test_a_missing_last_line_is_written_anew(store: RunStore, config: Config) -> None:
    save(store, config, 1, 2)
    path = store.folder / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    store.resume(config)
    assert store.history() == [record_of(1), record_of(2)]


def test_a_torn_line_is_left_out_when_reading(store: RunStore, config: Config) -> None:
    save(store, config, 1, 2)
    path = store.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert store.history() == [record_of(1)]


# ---- starting and refusing


def test_a_new_run_does_not_write_over_an_old_one(store: RunStore, config: Config) -> None:
    with pytest.raises(CheckpointError, match=r"already holds a run; continue it with --resume"):
        RunStore(store.folder).create(config)


def test_resuming_nothing_is_refused(tmp_path: Path, config: Config) -> None:
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        RunStore(tmp_path / "absent").resume(config)
    with pytest.raises(CheckpointError, match="is no run folder"):
        RunStore(tmp_path / "absent").config()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another --out"):
        RunStore(tmp_path / "file" / "run").create(config)


def test_a_different_configuration_is_refused_with_a_readable_difference(
    store: RunStore, config: Config, tiny: Tiny
) -> None:
    save(store, config, 1)
    with pytest.raises(CheckpointError) as caught:
        store.resume(tiny(seed=8, client={"epochs": 2}))
    message = str(caught.value)
    assert "(seed: 3 -> 8; client.epochs: 1 -> 2)" in message
    assert "\n" not in message


def test_rounds_and_resources_may_change_on_resume(store: RunStore, config: Config, tiny: Tiny) -> None:
    save(store, config, 1)
    changed = tiny(federation={"rounds": 20}, resources={"client_cpus": 1}, evaluation={"every": 5})
    assert same(store.resume(changed), state_of(1))
    assert store.config() == changed


def test_fewer_rounds_than_are_done_are_refused(store: RunStore, config: Config, tiny: Tiny) -> None:
    save(store, config, 1, 2, 3)
    with pytest.raises(CheckpointError, match=r"federation\.rounds: .* is at round 3 already, past 2"):
        store.resume(tiny(federation={"rounds": 2}))


# ---- files


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedppd_ray.runs.files.os.fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_json_with_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file", {"nll": float("nan")})
    assert not (tmp_path / "file").exists()


# ---- exported student


ABSTENTION = {
    "rows": 400,
    "coverage": 0.95,
    "threshold": 0.5,
    "table": [{"coverage": 1.0, "threshold": 2.3, "risk": 4.0}],
}


@pytest.fixture
def exported(tmp_path: Path, config: Config) -> Path:
    method = build_method(config)
    student = method.student(method.initial_models())
    (tmp_path / "run").mkdir()
    export_student(tmp_path / "run", config, 4, student, {"accuracy": 91.0}, ABSTENTION)
    return tmp_path / "run"


def edit_card(run: Path, **changes: object) -> None:
    path = run / "student" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replace_tensors(run: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = run / "student" / "student.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    edit_card(run, sha256=sha256(path.read_bytes()))


def test_an_exported_student_comes_back_bit_for_bit(exported: Path, config: Config) -> None:
    method = build_method(config)
    card, student = read_student(exported)
    assert np.array_equal(student.export(), method.initial_models()["student"])
    assert not student.module.training
    assert card["sha256"] == sha256((exported / "student" / "student.safetensors").read_bytes())


def test_the_card_holds_all_that_serving_needs(exported: Path, config: Config) -> None:
    card = read_card(exported)
    assert card["network"] == "mnist_student"
    assert card["classes"] == list("0123456789")
    assert card["input"] == {"channels": 1, "height": 28, "width": 28}
    assert card["normalisation"] == {"mean": [0.1307], "std": [0.3081]}
    assert (card["round"], card["metrics"], card["abstention"]) == (4, {"accuracy": 91.0}, ABSTENTION)
    assert (card["method"], card["name"], card["config_hash"]) == ("fedppd", "tiny", config_hash(config))


def test_the_weights_are_named_tensors_without_pickle(exported: Path) -> None:
    tensors = load_file(exported / "student" / "student.safetensors")
    assert tensors["conv1.weight"].shape == (20, 1, 5, 5)
    assert sum(array.size for array in tensors.values()) == 85_670


@pytest.mark.parametrize("damage", [truncate, flip])
def test_weights_that_are_not_the_cards_are_refused(exported: Path, damage: Callable[[Path], None]) -> None:
    damage(exported / "student" / "student.safetensors")
    with pytest.raises(CheckpointError, match="does not match the sha256"):
        read_student(exported)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("out.bias"), "out.bias"),
        (lambda tensors: tensors.update(extra=np.zeros(3, np.float32)), "extra"),
        (lambda tensors: tensors.update({"out.bias": np.zeros(11, np.float32)}), "out.bias"),
    ],
    ids=["missing", "too many", "wrong shape"],
)
def test_tensors_that_do_not_fit_the_network_are_refused(
    exported: Path, change: Callable[[dict[str, np.ndarray]], object], named: str
) -> None:
    replace_tensors(exported, change)
    with pytest.raises(CheckpointError, match=f"{named}.* do not fit the network"):
        read_student(exported)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 1}', b'{"format": 2, "network": "x"}'])
def test_a_malformed_card_is_refused_in_one_line(exported: Path, content: bytes) -> None:
    (exported / "student" / "model.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_student(exported)
    assert "model.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_network_of_another_version_is_refused(exported: Path) -> None:
    edit_card(exported, network="transformer")
    with pytest.raises(CheckpointError, match="unknown network 'transformer'"):
        read_student(exported)


def test_a_run_without_a_student_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is .* a finished run"):
        read_student(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_card(tmp_path)
