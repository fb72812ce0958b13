"""SECURITY.md, "What leaves a client", sentence by sentence: on the messages that driver and server received."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fedppd_ray.api import train
from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data import cache
from fedppd_ray.data.discretion import LOG
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.errors import DataError
from fedppd_ray.federation.types import ClientInfo, ClientUpdate, GlobalState
from fedppd_ray.inference.questions import FEWEST_ROWS, MOST_NUMBERS
from fedppd_ray.methods import build_method
from fedppd_ray.runtime.actors import RayClient
from fedppd_ray.workers.client import ClientWorker

NAMES = ("berlin", "oslo")
SIDE = 9


class Messages:
    """All that clients gave away in a run, as the executor received it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.infos: list[ClientInfo] = []
        self.updates: list[ClientUpdate] = []
        self.answers: list[dict[str, Any]] = []
        for method, kept in (("describe", self.infos.extend), ("local_update", self.updates.append)):
            self._watch(monkeypatch, method, kept)
        self._watch(monkeypatch, "answers", lambda found: self.answers.extend(found.values()))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, method: str, keep: Any) -> None:
        real = getattr(ClientWorker, method)

        def watched(worker: ClientWorker, *arguments: Any, **named: Any) -> Any:
            found = real(worker, *arguments, **named)
            keep(found)
            return found

        monkeypatch.setattr(ClientWorker, method, watched)

    def content(self) -> bytes:
        return pickle.dumps((self.infos, self.updates, self.answers))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    return Messages(monkeypatch)


def write_pictures(folder: Path, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for row in range(rows):
        place = folder / ("ill", "well")[row % 2]
        place.mkdir(parents=True, exist_ok=True)
        image = generator.integers(0, 256, (SIDE, SIDE)).astype(np.uint8)
        Image.fromarray(image).save(place / f"Jane Doe {seed}-{row:03d}.png")


def config_of(root: Path, rows: int = 120, **federation: Any) -> Config:
    for seed, name in enumerate(NAMES):
        write_pictures(root / "secret place" / name, rows, seed)
    write_pictures(root / "common" / "test", 20, 9)
    values = {
        "data": {"name": "folder", "root": str(root / "common")},
        "federation": {"rounds": 2, **federation},
        "client": {"epochs": 1, "batch_size": 20},
        "clients": {name: {"data": str(root / "secret place" / name)} for name in NAMES},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(root / "config.yaml")


def test_a_client_has_no_other_ways_out_than_those_that_are_recorded_here() -> None:
    """`train` is local_update of several and their seconds; `predict` is of the public held-out rows."""
    public = {name for name in dir(RayClient) if not name.startswith("_")}
    recorded, of_recorded = {"describe", "local_update", "answers"}, {"answer", "train"}
    nothing_of_rows = {"predict", "cancel", "ready", "process"}
    assert public == recorded | of_recorded | nothing_of_rows


def test_before_the_first_round_row_counts_and_which_classes_it_holds_and_no_counts_of_them(
    messages: Messages, tmp_path: Path
) -> None:
    train(config_of(tmp_path), tmp_path / "run", serial=True)
    assert messages.infos == [ClientInfo(name, 108, (), (True, True)) for name in NAMES]
    assert '"class_counts": []' in (tmp_path / "run" / "clients.json").read_text()


def test_counts_of_classes_leave_with_consent(messages: Messages, tmp_path: Path) -> None:
    config = config_of(tmp_path, rounds=1, share_class_counts=True)
    train(config, tmp_path / "run", serial=True)
    held = [np.bincount(Holdings(config, [name]).of(name).labels).tolist() for name in NAMES]
    assert [list(info.class_counts) for info in messages.infos] == held


def test_in_a_round_weights_a_row_count_and_means_over_the_training(messages: Messages, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    train(config, tmp_path / "run", serial=True)
    assert len(messages.updates) == 4
    method = build_method(config)
    sizes = method.update_sizes(GlobalState(0, method.initial_models()))
    for update in messages.updates:
        assert {role: (vector.dtype, len(vector)) for role, vector in update.models.items()} == {
            role: (np.dtype(np.float32), size) for role, size in sizes.items()
        }
        assert (update.receipt.client in NAMES, update.receipt.rows) == (True, 108)
        assert all(isinstance(value, float) for value in update.receipt.metrics.values())
        assert len(update.receipt.metrics) < 20


def test_answers_are_sums_whose_size_does_not_depend_on_the_rows(messages: Messages, tmp_path: Path) -> None:
    sizes = []
    for rows in (120, 240):
        place = tmp_path / str(rows)
        messages.answers.clear()
        train(config_of(place, rows, rounds=1), place / "run", serial=True)
        sizes.append([{key: value.size for key, value in answer.items()} for answer in messages.answers])
        assert {int(answer["rows"].sum()) for answer in messages.answers} == {rows // 10}
    assert sizes[0] == sizes[1] != []
    assert all(sum(size.values()) <= MOST_NUMBERS for size in sizes[0])


def test_of_fewer_than_ten_rows_nothing_is_answered(messages: Messages, tmp_path: Path) -> None:
    config = config_of(tmp_path, rows=50, rounds=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"calibration": 0.1})})
    train(config, tmp_path / "run", serial=True)
    assert FEWEST_ROWS > 5
    assert messages.answers == []


def test_no_row_no_path_and_no_name_of_a_file_leaves(messages: Messages, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    train(config, tmp_path / "run", serial=True)
    sent = messages.content()
    assert len(sent) > 10_000
    for name in NAMES:
        holdings = Holdings(config, [name])
        for split in (holdings.of(name), holdings.kept_back(name)):
            for image in split.images:
                assert image.tobytes() not in sent
                assert (image / 255).astype(np.float32).tobytes() not in sent
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    for content in (sent, kept):
        assert b"Jane" not in content
    assert b"secret place" not in sent


@pytest.mark.parametrize("what", ["read", "class"])
def test_an_error_says_what_is_wrong_and_not_where(tmp_path: Path, what: str) -> None:
    config = config_of(tmp_path)
    oslo = tmp_path / "secret place" / "oslo"
    if what == "read":
        (oslo / "ill" / "Jane Doe 1-000.png").write_bytes(b"no picture")
    else:
        (oslo / "Jane's class").mkdir()
        Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)).save(oslo / "Jane's class" / "x.png")
    with pytest.raises(DataError) as raised:
        ClientWorker(config, ["oslo"]).describe()
    text = str(raised.value)
    assert text.startswith("oslo: a file: " if what == "read" else "oslo: a folder: ")
    assert ("cannot be read as an image" if what == "read" else "a folder of no class") in text
    assert "Jane" not in text
    assert "secret place" not in text
    assert "Jane" in (cache.cache_root() / LOG).read_text().splitlines()[-1]  # where its own people look


@pytest.mark.parametrize(("line", "says"), [("61,Jane", "column 'y': a value is none of ill, well"),
                                            ("Jane,ill", "column 'age': a value is not a number")])  # fmt: skip
def test_an_error_quotes_no_value_of_a_table(tmp_path: Path, line: str, says: str) -> None:
    places = {name: tmp_path / f"secret {name}.csv" for name in NAMES}
    for place in (*places.values(), tmp_path / "test.csv"):
        place.write_text("age,y\n" + "50,ill\n40,well\n" * 30)
    values = {
        "data": {"name": "table", "root": str(tmp_path), "table": {"target": "y"}},
        "clients": {name: {"data": str(place)} for name, place in places.items()},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path / "config.yaml")
    places["oslo"].write_text(f"age,y\n50,ill\n{line}\n")
    with pytest.raises(DataError) as raised:
        ClientWorker(config, ["oslo"]).describe()
    assert says in str(raised.value)
    assert "Jane" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_files_that_are_left_out_are_counted_with_the_reason_and_without_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    for row in (0, 2):
        (tmp_path / "secret place" / "oslo" / "ill" / f"Jane Doe 1-00{row}.png").write_bytes(b"no picture")
    config = config.model_copy(update={"data": config.data.model_copy(update={"skip_bad_files": True})})
    for _ in range(2):  # parsed, and from the cache
        caplog.clear()
        assert ClientWorker(config, ["oslo"]).describe()[0].rows == 106
        assert "oslo: 2 files left out (2 × cannot be read as an image)" in caplog.text
        assert "Jane" not in caplog.text


def test_what_was_parsed_can_be_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    config = config_of(tmp_path)
    Holdings(config, ["oslo"]).of("oslo")
    (tmp_path / "cache" / LOG).write_text("Jane Doe\n")
    assert list((tmp_path / "cache").rglob("*.npy"))
    assert cache.clear() > 0
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert len(Holdings(config, ["oslo"]).of("oslo")) == 108  # and is parsed again
