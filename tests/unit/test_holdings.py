"""What clients hold: their part of the named data set, or a folder of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.schema import Config
from fedppd_ray.data.catalog import CATALOG
from fedppd_ray.data.datasets import load
from fedppd_ray.data.holdings import Holdings, prepare_data, read_folder
from fedppd_ray.data.partition import partition
from fedppd_ray.errors import ConfigError, DataError

GREY, COLOUR = CATALOG["mnist5k"], CATALOG["cifar10"]


def write(folder: Path, images: Any, labels: Any) -> Path:
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    return folder


def pixels(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_clients_hold_their_part_of_the_partition(tiny: Callable[..., Config]) -> None:
    config, train = tiny(), load("mnist5k").train
    split = partition(np.asarray(train.labels), 10, config.data, 3, config.seed)
    held = Holdings(config, ["client-02", "client-00"])
    for client, rows in (("client-00", split.clients[0]), ("client-02", split.clients[2])):
        assert np.array_equal(held.of(client).images, train.images[rows])
        assert np.array_equal(held.of(client).labels, train.labels[rows])


def test_a_client_cannot_be_asked_for_anothers_rows(tiny: Callable[..., Config]) -> None:
    with pytest.raises(KeyError):
        Holdings(tiny(), ["client-00"]).of("client-01")


def test_a_folder_of_its_own_takes_the_place_of_a_clients_part(tiny: Callable[..., Config], tmp_path: Path) -> None:
    write(tmp_path, pixels(7, 28, 28), np.arange(7))
    config = tiny(clients={"client-01": {"data": str(tmp_path)}})
    held = Holdings(config, ["client-00", "client-01"])
    assert np.array_equal(held.of("client-01").images[:, 0], pixels(7, 28, 28))
    assert held.of("client-01").labels.tolist() == list(range(7))
    assert np.array_equal(held.of("client-00").images, Holdings(tiny(), ["client-00"]).of("client-00").images)


def test_a_folder_holds_channels_last_and_is_read_channels_first(tmp_path: Path) -> None:
    images = pixels(5, 32, 32, 3)
    split = read_folder(write(tmp_path, images, np.arange(5, dtype=np.uint8)), COLOUR)
    assert split.images.shape == (5, 3, 32, 32)
    assert np.array_equal(split.images[:, 2], images[..., 2])
    assert split.labels.dtype == np.int64


def test_grey_images_may_come_with_or_without_a_channel(tmp_path: Path) -> None:
    with_channel = read_folder(write(tmp_path, pixels(5, 28, 28, 1), np.arange(5)), GREY)
    assert np.array_equal(with_channel.images[:, 0], pixels(5, 28, 28, 1)[..., 0])


@pytest.mark.parametrize(
    ("images", "labels", "file"),
    [
        (pixels(5, 28, 28).astype(np.float32), np.arange(5), "images.npy"),
        (pixels(5, 32, 32), np.arange(5), "images.npy"),
        (pixels(5, 1, 28, 28), np.arange(5), "images.npy"),
        (pixels(0, 28, 28), np.arange(0), "images.npy"),
        (pixels(5, 28, 28), np.arange(4), "labels.npy"),
        (pixels(5, 28, 28), np.arange(5) / 2, "labels.npy"),
        (pixels(5, 28, 28), np.arange(6, 11), "labels.npy"),
        (pixels(5, 28, 28), np.arange(-1, 4), "labels.npy"),
    ],
    ids=["floats", "size", "channels first", "empty", "fewer labels", "fractions", "label 10", "label -1"],
)
def test_a_folder_of_other_arrays_is_refused_by_file(tmp_path: Path, images: Any, labels: Any, file: str) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/{file}: "):
        read_folder(write(tmp_path, images, labels), GREY)


def test_a_missing_damaged_or_pickled_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: images.npy and labels.npy cannot be read here"):
        read_folder(tmp_path, GREY)
    write(tmp_path, pixels(5, 28, 28), np.arange(5))
    (tmp_path / "images.npy").write_bytes((tmp_path / "images.npy").read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read here"):
        read_folder(tmp_path, GREY)
    (tmp_path / "images.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read here"):
        read_folder(tmp_path, GREY)
    np.save(tmp_path / "images.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read here"):
        read_folder(tmp_path, GREY)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data": {"partition": {"kind": "major_classes", "extra_per_class": 200}}}, "data.partition.extra_per_class"),
        ({"data": {"partition": {"rows_per_client": 5000}}}, "data.partition.rows_per_client"),
        ({"active": {"labelled": 20, "pool": 5, "budget": 5}}, "active: client-00 holds 24 rows"),
    ],
)
def test_what_cannot_be_dealt_is_refused_before_a_run(tiny: Callable[..., Config], changes: Any, key: str) -> None:
    prepare_data(tiny())
    with pytest.raises(ConfigError) as caught:
        prepare_data(tiny(**changes))
    assert str(caught.value).startswith(key)
