"""Named data sets: read once, cached whole, shared read-only; what is missing or damaged is said in one line."""

import dataclasses
import gzip
import multiprocessing
import os
import socket
import string
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedppd_ray.config.nouns import NETWORKS, DatasetInfo
from fedppd_ray.data.cache import cache_root, data_root
from fedppd_ray.data.catalog import CATALOG
from fedppd_ray.data.datasets import load, load_ood, prepare
from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.data.sources import SOURCES
from fedppd_ray.errors import DataError

REAL = Path(os.environ.get("FEDPPD_DATA") or Path(__file__).parents[3] / "shared" / "data")
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PARTS: tuple[PartName, ...] = ("train", "test")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDPPD_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)


def idx(array: NDArray[np.uint8]) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def idx_arrays() -> tuple[NDArray[np.uint8], ...]:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (rows, 28, 28)).astype(np.uint8) for rows in (7, 3)]
    labels = [generator.integers(0, 10, rows).astype(np.uint8) for rows in (7, 3)]
    return images[0], labels[0], images[1], labels[1]


def write_idx(root: Path, zipped: Callable[[int], bool], folder: str = "MNIST") -> None:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for number, (name, array) in enumerate(zip(NAMES, idx_arrays(), strict=True)):
        if zipped(number):
            (raw / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (raw / name).write_bytes(idx(array))


def place(array: NDArray[np.uint8]) -> Path:
    """The file that an array is a map of."""
    assert isinstance(array, np.memmap)
    return Path(str(array.filename))


def one_line(caught: pytest.ExceptionInfo[DataError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- mnist5k


def test_mnist5k_is_5000_digits_of_which_100_a_class_are_held_out() -> None:
    data = load("mnist5k")
    assert data.train.images.shape == (4000, 1, 28, 28)
    assert data.test.images.shape == (1000, 1, 28, 28)
    assert np.bincount(data.train.labels).tolist() == [400] * 10
    assert np.bincount(data.test.labels).tolist() == [100] * 10
    assert data.train.images.dtype == np.uint8


def test_no_digit_of_mnist5k_is_both_trained_on_and_held_out() -> None:
    data = load("mnist5k")
    train = {image.tobytes() for image in data.train.images}
    assert not any(image.tobytes() in train for image in data.test.images)


def test_mnist5k_has_the_brightness_that_its_normalisation_assumes() -> None:
    data = load("mnist5k")
    pixels = data.train.images.astype(np.float64) / 255
    assert pixels.mean() == pytest.approx(CATALOG["mnist5k"].mean[0], abs=0.005)
    assert pixels.std() == pytest.approx(CATALOG["mnist5k"].std[0], abs=0.005)


# ---- cache


def test_arrays_are_read_only_maps_of_the_cache(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: True)
    data = load("mnist", str(tmp_path))
    for array in (data.train.images, data.train.labels, data.test.images, data.test.labels):
        assert isinstance(array, np.memmap)
        assert Path(str(array.filename)).is_relative_to(cache)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.usefixtures("cache")
def test_a_second_load_does_not_read_the_source_again(tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False)
    first = np.array(load("mnist", str(tmp_path)).train.images)
    for path in (tmp_path / "MNIST" / "raw").iterdir():
        path.unlink()
    assert np.array_equal(load("mnist", str(tmp_path)).train.images, first)


@pytest.mark.usefixtures("cache")
def test_files_replaced_in_place_are_read_again(tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False)
    path = tmp_path / "MNIST" / "raw" / NAMES[2]
    before = np.array(load("mnist", str(tmp_path)).test.images)
    path.write_bytes(idx(255 - idx_arrays()[2]))
    os.utime(path, ns=(0, 0))  # the same size: only the time of change tells
    assert np.array_equal(load("mnist", str(tmp_path)).test.images, 255 - before)


@pytest.mark.usefixtures("cache")
def test_a_change_of_the_test_files_leaves_the_parsed_training_rows_alone(tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False)
    first = load("mnist", str(tmp_path)).train.images
    os.utime(tmp_path / "MNIST" / "raw" / NAMES[2], ns=(0, 0))
    assert place(load("mnist", str(tmp_path)).train.images) == place(first)


@pytest.mark.usefixtures("cache")
def test_two_roots_have_two_caches(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_idx(tmp_path / name, lambda _: False)
    places = {place(load("mnist", str(tmp_path / name)).train.images) for name in ("a", "b")}
    assert len(places) == 2


def test_a_failed_reading_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False)
    (tmp_path / "MNIST" / "raw" / NAMES[2]).write_bytes(b"\0\0\x08\x03")
    with pytest.raises(DataError):
        prepare("mnist", str(tmp_path), ["test"])
    assert [path.name for path in (cache / "arrays").iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.usefixtures("cache")
def test_two_processes_at_once_parse_once_and_see_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path, lambda _: False)
    log = tmp_path / "log"
    real = SOURCES["mnist"]

    def slow(root: Path, part: PartName) -> Split:
        with log.open("a") as handle:
            handle.write("parsed\n")
        time.sleep(0.3)
        return real.read(root, part)

    def work(answers: "multiprocessing.Queue[int]") -> None:
        answers.put(int(load("mnist", str(tmp_path)).train.images.sum()))

    monkeypatch.setitem(SOURCES, "mnist", dataclasses.replace(real, read=slow))
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=work, args=(answers,)) for _ in range(2)]
    for process in processes:
        process.start()
    sums = {answers.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(30)
    assert sums == {int(idx_arrays()[0].sum())}
    assert log.read_text() == "parsed\n"


def test_a_cache_that_cannot_be_made_names_the_variable_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="set FEDPPD_CACHE to a writable folder"):
        prepare("mnist5k")


def test_an_empty_xdg_cache_home_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPPD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path.home().resolve() / ".cache" / "fedppd"


def test_the_setting_wins_over_the_environment_and_that_over_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_root(None) == cache / "downloads"
    monkeypatch.setenv("FEDPPD_DATA", str(tmp_path / "env"))
    assert data_root(None) == tmp_path / "env"
    assert data_root(str(tmp_path / "set")) == tmp_path / "set"


@pytest.mark.parametrize("name", ["glyphs", "nothing"])
def test_preparing_what_has_no_files_lists_what_has(name: str) -> None:
    with pytest.raises(
        DataError, match="choose one of cifar10, cifar100, fashion_mnist, femnist, folder, kmnist, mnist"
    ):
        prepare(name)


# ---- idx files


@pytest.mark.parametrize("zipped", [lambda _: False, lambda _: True, lambda number: number % 2 == 0])
def test_idx_files_are_read_plain_gzipped_and_mixed(tmp_path: Path, zipped: Callable[[int], bool]) -> None:
    write_idx(tmp_path, zipped, "FashionMNIST")
    train_x, train_y, test_x, test_y = idx_arrays()
    wanted: list[tuple[PartName, NDArray[np.uint8], NDArray[np.uint8]]]
    wanted = [("train", train_x, train_y), ("test", test_x, test_y)]
    for part, images, labels in wanted:
        split = SOURCES["fashion_mnist"].read(tmp_path, part)
        assert np.array_equal(split.images, images[:, None])
        assert np.array_equal(split.labels, labels)
        assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int64)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1], id="last byte missing"),
        pytest.param(lambda content: content + b"\0", id="one byte too many"),
        pytest.param(lambda content: content[:9], id="cut in the header"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"<html>" + content, id="a web page"),
        pytest.param(lambda content: b"\0\0\x08\0" + b"\1", id="no dimensions"),
        pytest.param(lambda content: b"\0\0\x0d" + content[3:], id="floats"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_idx(tmp_path, lambda _: False)
    path = tmp_path / "MNIST" / "raw" / NAMES[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        SOURCES["mnist"].read(tmp_path, "train")
    assert one_line(caught).startswith(str(path))
    assert "fetch it again" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-9], id="truncated"),
        pytest.param(lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:], id="one byte wrong"),
        pytest.param(lambda content: b"not gzip at all", id="other bytes"),
        pytest.param(lambda content: content[:10] + b"\xff" * 50, id="bad deflate stream"),
    ],
)
def test_a_damaged_gz_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_idx(tmp_path, lambda _: True)
    path = tmp_path / "MNIST" / "raw" / f"{NAMES[0]}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        SOURCES["mnist"].read(tmp_path, "train")
    assert one_line(caught).startswith(str(path))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "array"),
    [
        (NAMES[0], np.zeros((7, 32, 32), np.uint8)),
        (NAMES[0], np.zeros((8, 28, 28), np.uint8)),
        (NAMES[0], np.zeros(7, np.uint8)),
        (NAMES[1], np.full(7, 10, np.uint8)),
        (NAMES[3], np.zeros((3, 28, 28), np.uint8)),
    ],
    ids=["other size", "more images than labels", "labels for images", "label 10", "images for labels"],
)
def test_sound_files_of_another_data_set_do_not_get_into_the_cache(
    tmp_path: Path, name: str, array: NDArray[np.uint8]
) -> None:
    write_idx(tmp_path, lambda _: False)
    (tmp_path / "MNIST" / "raw" / name).write_bytes(idx(array))
    with pytest.raises(DataError, match=f"mnist under {tmp_path}: (train|test) .*fetch the files again"):
        prepare("mnist", str(tmp_path))


# ---- offline


@pytest.mark.usefixtures("cache", "offline")
@pytest.mark.parametrize(
    ("name", "folder", "files"),
    [
        ("mnist", "MNIST/raw", NAMES),
        ("fashion_mnist", "FashionMNIST/raw", NAMES),
        ("kmnist", "KMNIST/raw", NAMES),
        ("femnist", "femnist_leaf", (".json",)),
        ("cifar10", "cifar-10-batches-py", ("cifar-10-python.tar.gz", "data_batch_1", "test_batch")),
        ("cifar100", "cifar-100-python", ("cifar-100-python.tar.gz", "train", "test")),
        ("svhn", "SVHN", ("train_32x32.mat", "train_images.npy", "test_labels.npy")),
    ],
)
def test_offline_the_error_says_which_files_to_put_where(
    tmp_path: Path, name: str, folder: str, files: tuple[str, ...]
) -> None:
    messages = ""
    for part in PARTS:
        with pytest.raises(DataError) as caught:
            prepare(name, str(tmp_path / "empty"), [part])
        message = one_line(caught)
        assert str(tmp_path / "empty" / folder) in message
        assert "data.root or FEDPPD_DATA" in message
        messages += message
    assert all(file in messages for file in files)


@pytest.mark.usefixtures("cache", "offline")
def test_held_out_rows_need_no_training_files(tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False, "KMNIST")
    for name in NAMES[:2]:
        (tmp_path / "KMNIST" / "raw" / name).unlink()
    assert np.array_equal(load_ood("kmnist", CATALOG["mnist"], str(tmp_path))[:, 0], idx_arrays()[2])
    with pytest.raises(DataError, match="kmnist: its train part is not under"):
        prepare("kmnist", str(tmp_path))


@pytest.mark.usefixtures("cache", "offline")
def test_a_download_leaves_the_process_without_a_socket_timeout(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepare("cifar10", str(tmp_path))
    assert socket.getdefaulttimeout() is None


# ---- real files


def present(path: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (REAL / path).exists(), reason=f"no {path} under {REAL.name}: FEDPPD_DATA")


@present("cifar-10-batches-py")
def test_cifar10_is_read_from_its_python_version() -> None:
    train, test = (SOURCES["cifar10"].read(REAL, part) for part in PARTS)
    assert train.images.shape == (50_000, 3, 32, 32)
    assert test.images.shape == (10_000, 3, 32, 32)
    assert np.bincount(train.labels).tolist() == [5000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    means = train.images[::10].reshape(5000, 3, -1).mean(axis=(0, 2)) / 255
    assert means == pytest.approx(np.array(CATALOG["cifar10"].mean), abs=0.01)


@present("MNIST/raw")
def test_mnist_is_read_from_gzipped_files() -> None:
    train, test = (SOURCES["mnist"].read(REAL, part) for part in PARTS)
    assert (train.images.shape, test.images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert (train.labels[:5].tolist(), test.labels[:5].tolist()) == ([5, 0, 4, 1, 9], [7, 2, 1, 0, 4])


@present("KMNIST/raw")
def test_kmnists_test_rows_are_a_thousand_of_each_character() -> None:
    test = SOURCES["kmnist"].read(REAL, "test")
    assert test.images.shape == (10_000, 1, 28, 28)
    assert np.bincount(test.labels).tolist() == [1000] * 10


@present("SVHN/test_images.npy")
def test_svhn_is_read_from_plain_arrays() -> None:
    test = SOURCES["svhn"].read(REAL, "test")
    assert test.images.shape[1:] == (3, 32, 32)
    means = test.images.mean(axis=(0, 2, 3)) / 255
    assert means == pytest.approx(np.array(CATALOG["svhn"].mean), abs=0.03)


# ---- out of distribution, catalogue


@pytest.mark.usefixtures("cache")
def test_another_data_set_serves_as_out_of_distribution_by_its_test_rows(tmp_path: Path) -> None:
    write_idx(tmp_path, lambda _: False)
    images = load_ood("mnist", CATALOG["mnist5k"], str(tmp_path))
    assert np.array_equal(images[:, 0], idx_arrays()[2])


@pytest.mark.parametrize("info", [info for info in CATALOG.values() if not info.adapts], ids=lambda info: info.name)
def test_every_data_set_has_networks_that_take_its_images(info: DatasetInfo) -> None:
    assert len(info.mean) == len(info.std) == info.shape[0]
    for role in ("teacher", "student"):
        spec = NETWORKS[info.network(role)]
        assert spec.input_shape == info.shape or (spec.input_shape is None and spec.channels == info.shape[0])


def test_cifar100_is_for_resnets_and_femnist_for_52_letters() -> None:
    assert [CATALOG["cifar100"].network(role) for role in ("teacher", "student")] == ["resnet18", "resnet34"]
    assert len(CATALOG["cifar100"].classes) == 100
    assert "".join(CATALOG["femnist"].classes) == string.ascii_uppercase + string.ascii_lowercase
