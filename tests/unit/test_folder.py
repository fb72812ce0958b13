"""The data set that users bring: arrays or image files, its facts in the configuration, clients by folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fedppd_ray.cli.app import app, main
from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.folder import describe_folder, measure, read_folder
from fedppd_ray.data.holdings import Holdings, dataset_of, prepare_data
from fedppd_ray.data.pictures import write_sample
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.runs.store import RunStore

CLASSES = ("cat", "dog", "owl")
SMALL: dict[str, Any] = {
    "name": "own",
    "federation": {"clients": 2, "rounds": 1},
    "client": {"epochs": 1, "batch_size": 8},
    "data": {"name": "folder", "partition": {"kind": "iid"}},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("FEDPPD_DATA", raising=False)


def pixels(rows: int, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape)).astype(np.uint8)


def write_arrays(folder: Path, rows: int, *shape: int, seed: int = 0) -> None:
    folder.mkdir(parents=True)
    np.save(folder / "images.npy", pixels(rows, *shape, seed=seed))
    np.save(folder / "labels.npy", np.arange(rows) % len(CLASSES))


def write_images(folder: Path, each: int, *shape: int, seed: int = 0, suffix: str = "png") -> None:
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for row, picture in enumerate(pixels(each, *shape, seed=10 * seed + number)):
            Image.fromarray(picture).save(folder / name / f"{row}.{suffix}")


def arrays(root: Path, *shape: int) -> Path:
    write_arrays(root / "train", 30, *shape)
    write_arrays(root / "test", 9, *shape, seed=1)
    (root / "dataset.json").write_text(json.dumps({"classes": CLASSES}))
    return root


def pictures(root: Path, *shape: int) -> Path:
    write_images(root / "train", 4, *shape)
    write_images(root / "test", 2, *shape, seed=1)
    return root


def config(root: Path, *settings: str, **data: Any) -> Config:
    values = {**SMALL, "data": {**SMALL["data"], "root": str(root), **data}}
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path, settings)


# ---- facts


@pytest.mark.parametrize("make", [arrays, pictures])
def test_the_facts_of_a_folder_are_read_off_it(tmp_path: Path, make: Callable[..., Path]) -> None:
    info = config(make(tmp_path, 28, 28)).dataset
    assert info.classes == CLASSES
    assert info.shape == (1, 28, 28)
    images = read_folder(tmp_path / "train", info).images / 255
    assert info.mean == pytest.approx([images.mean()], abs=1e-6)
    assert info.std == pytest.approx([images.std()], abs=1e-6)


def test_colour_is_measured_channel_by_channel(tmp_path: Path) -> None:
    info = describe_folder(pictures(tmp_path, 32, 32, 3))
    images = read_folder(tmp_path / "train", info).images / 255
    assert info.shape == (3, 32, 32)
    assert info.mean == pytest.approx(images.mean(axis=(0, 2, 3)), abs=1e-6)
    assert info.std == pytest.approx(images.std(axis=(0, 2, 3)), abs=1e-6)


def test_images_of_one_colour_are_not_divided_by_zero() -> None:
    assert measure([np.full((3, 1, 4, 4), 51, np.uint8)]) == ((0.2,), (1.0,))


@pytest.mark.parametrize("said", ["mean", "std"])
def test_only_what_dataset_json_leaves_out_is_measured(tmp_path: Path, said: str) -> None:
    arrays(tmp_path, 28, 28)
    measured = describe_folder(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"classes": CLASSES, said: [0.25]}))
    found = describe_folder(tmp_path)
    left_out = "std" if said == "mean" else "mean"
    assert getattr(found, said) == (0.25,)
    assert getattr(found, left_out) == getattr(measured, left_out)


def test_what_dataset_json_says_is_not_measured(tmp_path: Path) -> None:
    facts = {
        "classes": CLASSES,
        "shape": [1, 28, 28],
        "mean": [0.25],
        "std": [0.5],
        "networks": {"teacher": "femnist_teacher", "student": "femnist_student"},
    }
    arrays(tmp_path, 28, 28)
    (tmp_path / "dataset.json").write_text(json.dumps(facts))
    found = config(tmp_path)
    assert (found.dataset.mean, found.dataset.std) == ((0.25,), (0.5,))
    assert [found.network_for(role) for role in ("teacher", "student")] == ["femnist_teacher", "femnist_student"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"colours": 3}', "unknown key 'colours'"),
        ("{", "is not of the form"),
        ("[1]", "is not of the form"),
        ('{"classes": 3}', "is not of the form"),
        ('{"shape": [28, 28]}', "shape must be three numbers"),
        ('{"networks": {"teacher": "mnist_teacher"}}', "is not of the form"),
    ],
)
def test_a_dataset_json_that_cannot_be_used_is_named(tmp_path: Path, content: str, says: str) -> None:
    arrays(tmp_path, 28, 28)
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError) as caught:
        describe_folder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/dataset.json: {says}")


def test_arrays_without_named_classes_ask_for_dataset_json(tmp_path: Path) -> None:
    arrays(tmp_path, 28, 28)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(DataError, match=r'dataset\.json: arrays need it to name the classes, as {"classes"'):
        describe_folder(tmp_path)


def test_a_missing_folder_or_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.root to the folder that holds train/ and test/"):
        describe_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no train folder"):
        describe_folder(tmp_path)
    write_arrays(tmp_path / "train", 3, 28, 28)
    with pytest.raises(DataError, match="has no test folder"):
        describe_folder(tmp_path)


# ---- the configuration knows what the folder says


def test_a_runs_configuration_needs_the_folder_no_more(tmp_path: Path) -> None:
    before = config(arrays(tmp_path / "own", 28, 28))
    store = RunStore(tmp_path / "run")
    store.create(before)
    (tmp_path / "own").rename(tmp_path / "gone")
    after = load_config(tmp_path / "run" / "config.yaml")
    assert after.dataset == before.dataset
    assert after == before


def test_networks_are_chosen_by_the_shape_of_the_images(tmp_path: Path) -> None:
    grey, colour = config(arrays(tmp_path / "a", 28, 28)), config(arrays(tmp_path / "b", 32, 32, 3))
    assert [grey.network_for(role) for role in ("teacher", "student")] == ["mnist_teacher", "mnist_student"]
    assert [colour.network_for(role) for role in ("teacher", "student")] == ["cifar10_teacher", "cifar10_student"]


def test_where_the_paper_has_no_network_for_the_shape_a_small_one_takes_it(tmp_path: Path) -> None:
    arrays(tmp_path, 20, 24, 3)
    assert [config(tmp_path).network_for(role) for role in ("teacher", "student")] == ["small_teacher", "small_student"]
    with pytest.raises(ConfigError, match=r"student\.network: mnist_student takes .*\(3, 20, 24\); use 'auto'"):
        config(tmp_path, "student.network=mnist_student")
    chosen = config(tmp_path, "teacher.network=resnet18", "student.network=resnet34")
    assert chosen.network_for("student") == "resnet34"


@pytest.mark.parametrize(
    ("folder", "key"),
    [
        ({"classes": ["a"]}, "data.folder.classes"),
        ({"classes": ["a", "a"]}, "data.folder.classes"),
        ({"shape": [5, 28, 28]}, "data.folder.shape"),
        ({"mean": [0.1, 0.2]}, "data.folder.mean"),
        ({"std": [0.0]}, "data.folder.std"),
        ({"colour": True}, "data.folder.colour"),
        ({"networks": ["nothing", "mnist_student"]}, "teacher.network"),
    ],
)
def test_facts_that_do_not_fit_are_refused_by_key(tmp_path: Path, folder: dict[str, Any], key: str) -> None:
    facts = {"classes": ["a", "b"], "shape": [1, 28, 28], "mean": [0.1], "std": [0.3]}
    facts |= {"networks": ["mnist_teacher", "mnist_student"]}
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, folder={**facts, **folder})
    assert str(caught.value).startswith(f"{key}:")


def test_a_named_data_set_takes_no_folder_section(tmp_path: Path) -> None:
    facts = {"classes": ["a", "b"], "shape": [1, 28, 28], "mean": [0.1], "std": [0.3]}
    with pytest.raises(ConfigError, match=r"data\.folder: only data\.name: folder takes it"):
        config(tmp_path, folder=facts, name="mnist5k")


# ---- image files


@pytest.mark.parametrize("suffix", ["png", "PNG"])
def test_image_files_become_rows_in_the_order_of_their_names(tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path / "train", 3, 28, 28, suffix=suffix)
    write_images(tmp_path / "test", 1, 28, 28)
    split = read_folder(tmp_path / "train", describe_folder(tmp_path))
    assert split.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert np.array_equal(split.images[3:6, 0], pixels(3, 28, 28, seed=1))


def test_image_files_are_parsed_once_and_again_when_they_change(tmp_path: Path) -> None:
    info = describe_folder(pictures(tmp_path, 28, 28))
    first = read_folder(tmp_path / "train", info).images
    assert isinstance(first, np.memmap)
    again = read_folder(tmp_path / "train", info).images
    assert isinstance(again, np.memmap)
    assert again.filename == first.filename
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "train" / "cat" / "0.png")
    os.utime(tmp_path / "train" / "cat" / "0.png", ns=(1, 1))
    assert not read_folder(tmp_path / "train", info).images[0].any()


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        (np.zeros((28, 30), np.uint8), "28×30 pixels where the others have 28×28"),
        (np.zeros((28, 28, 3), np.uint8), "a colour image among grey ones"),
        (np.zeros((28, 28), np.uint16), "the others' are of 8 bits"),
        (None, "cannot be read as an image"),
    ],
    ids=["size", "colour", "16 bits", "damaged"],
)
def test_an_offending_image_file_is_named(tmp_path: Path, picture: Any, says: str) -> None:
    pictures(tmp_path, 28, 28)
    path = tmp_path / "train" / "owl" / "3.png"
    if picture is None:
        path.write_bytes(path.read_bytes()[:60])
    else:
        Image.fromarray(picture).save(path)
    with pytest.raises(DataError) as caught:
        describe_folder(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_class_that_training_does_not_know_is_refused(tmp_path: Path) -> None:
    pictures(tmp_path, 28, 28)
    info = describe_folder(tmp_path)
    (tmp_path / "test" / "yak").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path}/test/yak: a folder of no class; the classes are cat, dog, owl"):
        read_folder(tmp_path / "test", info)


# ---- clients by folder


def by_client(root: Path, clients: int = 2, make: Callable[..., None] = write_arrays) -> Path:
    for number in range(clients):
        make(root / "clients" / f"client-0{number}", 6 + number, 28, 28, seed=number)
    make(root / "test", 9, 28, 28, seed=7)
    if make is write_arrays:
        (root / "dataset.json").write_text(json.dumps({"classes": CLASSES}))
    return root


@pytest.mark.parametrize("make", [write_arrays, write_images])
def test_client_folders_say_who_holds_what(tmp_path: Path, make: Callable[..., None]) -> None:
    found = config(by_client(tmp_path, make=make), partition={})
    assert found.data.partition.kind == "folders"
    held = Holdings(found, ["client-00", "client-01"])
    for client in ("client-00", "client-01"):
        expected = read_folder(tmp_path / "clients" / client, found.dataset)
        assert np.array_equal(held.of(client).images, expected.images)
        assert np.array_equal(held.of(client).labels, expected.labels)


def test_with_client_folders_the_common_rows_are_the_servers_alone(tmp_path: Path) -> None:
    write_arrays(by_client(tmp_path) / "train", 30, 28, 28, seed=5)
    held_out = HeldOut(config(tmp_path, "server.aggregate=distill", partition={}, server_pool=20, calibration=10))
    assert len(held_out.server_pool()) == 20
    common = {image.tobytes() for image in pixels(30, 28, 28, seed=5)}
    assert {image.tobytes() for image in held_out.images("calibration")} <= common


def test_client_folders_need_no_common_rows(tmp_path: Path) -> None:
    found = config(by_client(tmp_path), partition={})
    prepare_data(found)
    held_out = HeldOut(found)
    assert len(held_out.images("calibration")) == len(held_out.labels("calibration")) == 0
    assert len(held_out.images("test")) == 9


def test_rows_for_the_server_that_nobody_has_are_missed_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/train: images.npy and labels.npy cannot be read"):
        prepare_data(config(by_client(tmp_path), "server.aggregate=distill", partition={}, server_pool=5))


def test_the_number_of_client_folders_is_the_number_of_clients(tmp_path: Path) -> None:
    by_client(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"federation\.clients: 2, but .*clients has 3 folders; set it to 3"):
        config(tmp_path, partition={})
    assert config(tmp_path, "federation.clients=3", partition={}).federation.clients == 3


def test_every_client_has_a_folder_by_its_id(tmp_path: Path) -> None:
    by_client(tmp_path)
    (tmp_path / "clients" / "client-01").rename(tmp_path / "clients" / "hospital-b")
    with pytest.raises(ConfigError, match="client-01 has no folder"):
        config(tmp_path, partition={})


def test_another_partition_than_the_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition\.kind: .*set it to folders, not iid"):
        config(by_client(tmp_path), partition={"kind": "iid"})


def test_a_named_data_set_has_no_client_folders(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition\.kind: folders is for data\.name: folder"):
        tiny(data={"partition": {"kind": "folders"}})


# ---- whole


def run(*arguments: str) -> None:
    main(lambda: app(list(arguments), standalone_mode=False))


def test_a_prepared_data_set_is_read_back_to_the_bit(tmp_path: Path) -> None:
    run("data", "prepare", "mnist5k", "--out", str(tmp_path))
    mine, named = config(tmp_path), load("mnist5k")
    for part in ("train", "test"):
        first, second = getattr(dataset_of(mine), part), getattr(named, part)
        assert np.array_equal(first.images, second.images)
        assert np.array_equal(first.labels, second.labels)
    assert (mine.dataset.mean, mine.dataset.std) == (named.info.mean, named.info.std)
    assert mine.dataset.classes == named.info.classes
    assert mine.network_for("teacher") == "mnist_teacher"


def test_a_folder_of_pictures_trains_and_is_served_under_its_own_class_names(tmp_path: Path) -> None:
    config(pictures(tmp_path, 28, 28))
    run("train", str(tmp_path / "config.yaml"), "--serial", "--out", str(tmp_path / "run"))
    card = json.loads((tmp_path / "run" / "student" / "model.json").read_text())
    assert card["classes"] == list(CLASSES)
    assert (card["network"], card["input"]["height"]) == ("mnist_student", 28)


def test_a_sample_of_a_folder_is_its_held_out_row(tmp_path: Path) -> None:
    root = pictures(tmp_path / "own", 6, 6)
    shows = write_sample("folder", 0, tmp_path / "row.png", str(root))
    test = load("folder", str(root)).test
    assert shows == f"class {CLASSES[test.labels[0]]}"
    assert np.array_equal(np.asarray(Image.open(tmp_path / "row.png")), test.images[0][0])
