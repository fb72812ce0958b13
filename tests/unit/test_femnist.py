"""FEMNIST from LEAF's files: letters only, ink bright, and clients of whole writers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.cli.app import app, main
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.holdings import Holdings, dataset_of, partition_of
from fedppd_ray.data.readers import leaf
from fedppd_ray.errors import ConfigError, DataError

REAL = Path(os.environ.get("FEDPPD_DATA") or Path(__file__).parents[3] / "shared" / "data")
CONFIG = Path(__file__).parents[2] / "configs" / "femnist.yaml"


def write_leaf(root: Path, writers: int = 6, rows: int = 9, digits: int = 2, seed: int = 0) -> None:
    """`rows` letters and `digits` digits of each writer, three writers per file, ink 0 on paper 1."""
    generator = np.random.default_rng(seed)
    for part in ("train", "test"):
        folder = root / part
        folder.mkdir(parents=True)
        for first in range(0, writers, 3):
            names = [f"f{number:04d}_{number:02d}" for number in range(first, min(first + 3, writers))]
            data = {
                name: {
                    "x": np.round(generator.uniform(0, 1, (rows + digits, 784)), 2).tolist(),
                    "y": [*generator.integers(10, 62, rows).tolist(), *generator.integers(0, 10, digits).tolist()],
                }
                for name in names
            }
            content = {"users": names, "num_samples": [rows + digits] * len(names), "user_data": data}
            (folder / f"all_data_{first // 3}_{part}.json").write_text(json.dumps(content))


def contents(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((root / "femnist" / "train").iterdir())]


@pytest.mark.parametrize("folder", ["femnist_leaf", "femnist", "femnist/data"])
def test_both_parts_are_found_under_leafs_names(tmp_path: Path, folder: str) -> None:
    write_leaf(tmp_path / folder)
    assert len(leaf.read(tmp_path, "train")) == len(leaf.read(tmp_path, "test")) == 6 * 9


def test_digits_are_dropped_and_letters_numbered_from_zero(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist")
    labels = [
        label
        for content in contents(tmp_path)
        for user in content["users"]
        for label in content["user_data"][user]["y"]
    ]
    assert leaf.read(tmp_path, "train").labels.tolist() == [label - 10 for label in labels if label >= 10]


def test_ink_is_bright_on_dark_paper(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist")
    first = contents(tmp_path)[0]
    x = np.array(first["user_data"][first["users"][0]]["x"][0])
    ink = leaf.read(tmp_path, "train").images[0, 0].reshape(-1)
    assert np.abs(ink - 255 * (1 - x)).max() < 0.501  # rounded to whole numbers


def test_every_row_knows_its_writer(tmp_path: Path) -> None:
    write_leaf(tmp_path / "femnist")
    assert np.bincount(np.asarray(leaf.read(tmp_path, "train").writers)).tolist() == [9] * 6


def test_writers_survive_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    write_leaf(tmp_path / "femnist")
    train = load("femnist", str(tmp_path)).train
    assert isinstance(train.writers, np.memmap)
    assert np.array_equal(train.writers, np.asarray(leaf.read(tmp_path, "train").writers))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"users": ["a"]}',
        b'{"users": ["a"], "user_data": {"a": {"x": [[1, 2]], "y": [10]}}}',
        json.dumps({"users": ["a"], "user_data": {"a": {"x": [[255] * 784], "y": [10]}}}).encode(),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    write_leaf(tmp_path / "femnist")
    path = tmp_path / "femnist" / "train" / "all_data_1_train.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} is not a json file of LEAF's FEMNIST"):
        leaf.read(tmp_path, "train")


def test_clients_of_femnist_hold_whole_writers(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    write_leaf(tmp_path / "femnist")
    data = {"name": "femnist", "root": str(tmp_path), "server_pool": 10, "calibration": 0}
    config = tiny(data={**data, "partition": {"kind": "writers", "rows_per_client": None}})
    train = dataset_of(config).train
    split = partition_of(config, train)
    assert len(split.server_pool) == 18  # two writers
    assert sorted(len(rows) for rows in split.clients) == [9, 9, 18]
    held = Holdings(config, ["client-01"]).of("client-01")
    assert np.array_equal(held.images, train.images[split.clients[1]])


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "major_classes"])
def test_femnist_can_be_split_in_the_other_ways_too(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("FEDPPD_CACHE", str(tmp_path / "cache"))
    write_leaf(tmp_path / "femnist")
    part = {"kind": kind, "rows_per_client": None, "extra_per_class": 0, "major": 20, "alpha": 5.0}
    config = tiny(
        data={"name": "femnist", "root": str(tmp_path), "server_pool": 5, "calibration": 5, "partition": part}
    )
    split = partition_of(config, dataset_of(config).train)
    places = [*split.clients, split.server_pool, split.calibration, split.unused]
    assert np.array_equal(np.sort(np.concatenate(places)), np.arange(54))


def test_a_data_set_without_writers_cannot_be_split_by_them(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition\.kind: mnist5k does not say who wrote a row"):
        tiny(data={"partition": {"kind": "writers"}})


@pytest.mark.skipif(not (REAL / "femnist_leaf").exists(), reason=f"no femnist_leaf under {REAL.name}: FEDPPD_DATA")
def test_the_preset_trains_on_letters_in_leafs_format(tmp_path: Path) -> None:
    """One round of a tenth of the rows, by the command; the partition itself is the preset's."""
    settings = (
        *("federation.rounds=1", "client.epochs=1", "data.partition.rows_per_client=42"),
        *("evaluation.ood=glyphs", f"data.root={REAL}"),
    )
    arguments = ["train", str(CONFIG), "--serial", "--out", str(tmp_path / "run")]
    for setting in settings:
        arguments += ["--set", setting]
    main(lambda: app(arguments, standalone_mode=False))
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert record["clients"] == 10
    assert record["rows"] == pytest.approx(10 * 38, rel=0.1)  # a writer each, less its calibration rows
    assert 0 < record["nll"] < 2 * np.log(52)
    card = json.loads((tmp_path / "run" / "student" / "model.json").read_text())
    assert (card["network"], len(card["classes"])) == ("femnist_student", 52)
