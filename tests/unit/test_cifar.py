"""CIFAR's python version: pickles that may only hold arrays, and one round of FedPPD with ResNets on them."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.sources import SOURCES
from fedppd_ray.errors import DataError
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.round import federated_round
from fedppd_ray.workers.serial import SerialExecutor

FOLDER = "cifar-100-python"


def batch(rows: int, seed: int, key: str = "fine_labels", classes: int = 100) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "data": generator.integers(0, 256, (rows, 3072)).astype(np.uint8),
        key: generator.integers(0, classes, rows).tolist(),
        "coarse_labels": [0] * rows,
        "filenames": ["a.png"] * rows,
    }


def write(root: Path, train: int = 60, test: int = 20) -> None:
    (root / FOLDER).mkdir(parents=True)
    for number, (name, rows) in enumerate((("train", train), ("test", test))):
        # Protocol 2, as Python 2 wrote the published files.
        (root / FOLDER / name).write_bytes(pickle.dumps(batch(rows, number), protocol=2))


def test_cifar100s_fine_labels_and_planes_of_colour_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    split, raw = SOURCES["cifar100"].read(tmp_path, "train"), batch(60, 0)
    assert split.labels.tolist() == raw["fine_labels"]
    assert np.array_equal(split.images[:, 2].reshape(60, -1), raw["data"][:, 2048:])


def test_cifar10s_batches_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        content = pickle.dumps(batch(4, number, "labels", 10), protocol=2)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(content)
    expected = [label for number in range(5) for label in batch(4, number, "labels", 10)["labels"]]
    assert SOURCES["cifar10"].read(tmp_path, "train").labels.tolist() == expected
    assert SOURCES["cifar10"].read(tmp_path, "test").labels.tolist() == batch(4, 5, "labels", 10)["labels"]


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("echo ran > ran.txt",)


def test_a_pickle_that_would_run_code_is_refused_unrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / FOLDER / "train").write_bytes(pickle.dumps({"data": Command()}, protocol=2))
    with pytest.raises(DataError, match=r"it asks for .*system"):
        SOURCES["cifar100"].read(tmp_path, "train")
    assert not (tmp_path / "ran.txt").exists()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-100], id="cut short"),
        pytest.param(lambda content: b"damaged", id="other bytes"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: pickle.dumps(batch(5, 0, "labels")), id="labels of CIFAR-10"),
        pytest.param(lambda content: pickle.dumps([1, 2]), id="a list"),
        pytest.param(lambda content: pickle.dumps({**batch(5, 0), "fine_labels": [1]}), id="fewer labels"),
    ],
)
def test_a_damaged_batch_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write(tmp_path)
    path = tmp_path / FOLDER / "train"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        SOURCES["cifar100"].read(tmp_path, "train")
    assert str(caught.value).startswith(f"{path} is not a batch of CIFAR's python version")
    assert "fetch it again" in str(caught.value)


def test_one_round_of_fedppd_on_cifar100_trains_resnets_with_their_running_statistics(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    write(tmp_path, train=12, test=2)
    config = tiny(
        data={
            "name": "cifar100",
            "root": str(tmp_path),
            "server_pool": 4,
            "calibration": 0,
            "partition": {"kind": "iid", "rows_per_client": 4},
        },
        federation={"clients": 2, "rounds": 1},
        client={"batch_size": 4, "augment": "crop_flip"},
        server={"aggregate": "distill", "distill": {"epochs": 1, "batch_size": 4, "samples": 1}},
        evaluation={"ood": None},
    )
    assert [config.network_for(role) for role in ("teacher", "student")] == ["resnet18", "resnet34"]
    executor = SerialExecutor(config, ["client-00", "client-01"])
    executor.server.install(None)
    before = executor.server.state()
    federated_round(executor, 1, ["client-00", "client-01"], FailurePolicy(0, 1.0), Observer())
    after = executor.server.state()
    for role in ("teacher", "student"):
        assert np.isfinite(after.models[role]).all()
        assert not np.array_equal(before.models[role], after.models[role])
    assert np.isfinite(executor.evaluation.predict("test")).all()
    assert executor.evaluation.predict("test").shape == (2, 100)
    assert len(load("cifar100", str(tmp_path)).train) == 12
