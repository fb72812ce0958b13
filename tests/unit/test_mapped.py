"""Rows that are too many to copy stay in their file, and train to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config
from fedppd_ray.data import mapped
from fedppd_ray.data.folder import read_folder
from fedppd_ray.data.mapped import rows_of, stays_mapped
from fedppd_ray.data.rows import ImageShard, MappedShard, make_shard
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.workers.client import ClientWorker

INFO = DatasetInfo("raw", tuple("abc"), (3, 9, 7), (0.4, 0.5, 0.6), (0.2, 0.2, 0.2), "none")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(mapped, "MOST_RESIDENT_BYTES", 100)


def mapped_images(tmp_path: Path, shape: tuple[int, ...] = (31, 3, 9, 7)) -> Any:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    return np.load(tmp_path / "images.npy", mmap_mode="r")


@pytest.mark.parametrize("augment", [False, True])
def test_batches_from_the_file_are_those_from_memory(
    tmp_path: Path, augment: bool, little_memory: Callable[[], None]
) -> None:
    images, labels = mapped_images(tmp_path), np.arange(31) % 3
    resident = make_shard(images, labels, INFO, augment=augment)
    little_memory()
    read = make_shard(images, labels, INFO, augment=augment)
    assert (type(resident), type(read)) == (ImageShard, MappedShard)
    assert len(read) == len(resident)
    assert torch.equal(read.labels, resident.labels)
    epochs = [list(shard.batches(8, torch.Generator().manual_seed(4))) for shard in (resident, read)]
    assert len(epochs[0]) == len(epochs[1]) == 4
    for (one, one_rows), (other, other_rows) in zip(*epochs, strict=True):
        assert torch.equal(one_rows, other_rows)
        assert torch.equal(one, other)
        assert one.stride() == other.stride()  # another layout may change the last bit of a convolution


def test_a_choice_of_a_choice_is_noted_and_what_is_small_or_in_memory_is_copied(
    tmp_path: Path, little_memory: Callable[[], None]
) -> None:
    images, rows = mapped_images(tmp_path), np.array([7, 3, 30, 11])
    assert isinstance(rows_of(images, rows), np.ndarray)
    little_memory()
    noted = rows_of(rows_of(images, rows), np.array([2, 0]))
    assert stays_mapped(noted)
    assert (len(noted), noted.shape) == (2, (2, 3, 9, 7))
    assert np.array_equal(np.asarray(noted), images[[30, 7]])
    assert np.array_equal(noted[1:], images[[7]])
    assert not stays_mapped(np.array(images))  # in memory it is already
    assert not stays_mapped(images[:0])


def config_for(site: Path, side: int, **sections: Any) -> Config:
    folder = {"classes": ["clear", "dense"], "shape": [1, side, side], "mean": [0.5], "std": [0.5]}
    values = {
        "method": "fedavg",
        "data": {"name": "folder", "folder": folder, "partition": {"kind": "iid"}},
        "federation": {"clients": 1},
        "client": {"epochs": 1, "batch_size": 8},
        "evaluation": {"ood": None},
        "clients": {"client-00": {"data": str(site)}},
        **sections,
    }
    return parse_config(values)


def test_a_client_trains_from_its_file_to_the_bits_of_one_that_copied_it(
    tmp_path: Path, little_memory: Callable[[], None]
) -> None:
    site = tmp_path / "site"
    for name in ("clear", "dense"):
        (site / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(site / name / f"{number}.png")

    def trained() -> Any:
        config = config_for(site, 16)
        worker = ClientWorker(config, ["client-00"])
        update = worker.local_update("client-00", GlobalState(0, build_method(config).initial_models()))
        return type(worker._shard("client-00")), update.models["model"]

    kind, resident = trained()
    little_memory()
    other_kind, read = trained()
    assert (kind, other_kind) == (ImageShard, MappedShard)
    assert np.array_equal(resident, read)


def test_more_pictures_than_may_be_copied_take_no_memory_in_a_client(tmp_path: Path) -> None:
    """1.2 GB of 224×224 pixels, in a file with a hole where its bytes would be."""
    site, rows = tmp_path / "site", 24_000
    site.mkdir()
    np.lib.format.open_memmap(site / "images.npy", "w+", np.uint8, (rows, 224, 224))
    np.save(site / "labels.npy", np.arange(rows) % 2)
    worker = ClientWorker(config_for(site, 224), ["client-00"])
    before = psutil.Process().memory_info().rss
    assert worker.describe()[0].rows == rows
    shard = worker._shard("client-00")
    inputs, _ = next(shard.batches(40, torch.Generator().manual_seed(0)))
    assert inputs.shape == (40, 1, 224, 224)
    assert psutil.Process().memory_info().rss - before < 300e6


def test_pictures_are_parsed_into_a_file_and_not_into_memory(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "clear").mkdir(parents=True)
    (site / "dense").mkdir()
    for number in range(3):
        Image.fromarray(np.full((16, 16), number, np.uint8)).save(site / "dense" / f"{number}.png")
    split = read_folder(site, config_for(site, 16).dataset)
    assert [int(image[0, 0, 0]) for image in split.images] == [0, 1, 2]
    assert split.labels.tolist() == [1, 1, 1]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["arrays"]  # nothing is left behind
