"""Clients that hold their rows themselves: no common rows, no partition, facts from sums."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from fedppd_ray.api import train
from fedppd_ray.config.file import load_config, parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.folder import measure
from fedppd_ray.data.foreign import read_foreign, spread
from fedppd_ray.data.holdings import prepare_data
from fedppd_ray.data.image_sums import image_sums, read_image_sums, write_image_sums
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.runs.run import Run

NAMES = ("berlin", "london", "oslo", "rome")
SIDE = 12


def picture(label: int, generator: np.random.Generator) -> np.ndarray:
    """A bright half: the upper or the lower one."""
    image = generator.integers(0, 90, (SIDE, SIDE)).astype(np.uint8)
    half = slice(0, SIDE // 2) if label == 0 else slice(SIDE // 2, SIDE)
    image[half] += 120
    return image


def write_pictures(folder: Path, rows: int, seed: int, classes: tuple[str, ...] = ("lower", "upper")) -> None:
    generator = np.random.default_rng(seed)
    for row in range(rows):
        place = folder / classes[row % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(1 - row % 2, generator)).save(place / f"patient-{seed}-{row:03d}.png")


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """Four folders of PNGs in four places, and test rows in a fifth."""
    for seed, name in enumerate(NAMES):
        write_pictures(tmp_path / "houses" / name, 60 + 10 * seed, seed)
    write_pictures(tmp_path / "common" / "test", 40, 9)
    return tmp_path


def values_of(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data": {"name": "folder", "root": str(root / "common")},
        "federation": {"rounds": 2},
        "client": {"epochs": 2, "batch_size": 20},
        "clients": {name: {"data": str(root / "houses" / name)} for name in NAMES},
        **changes,
    }


def written(folder: Path, values: dict[str, Any]) -> Config:
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "config.yaml")


def listing(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


def test_four_folders_need_neither_common_training_rows_nor_a_partition(houses: Path) -> None:
    config = written(houses, values_of(houses))
    assert config.client_names == list(NAMES)
    assert (config.data.partition.kind, config.data.calibration, config.evaluation.ood) == ("folders", "auto", None)
    assert config.dataset.classes == ("lower", "upper")
    assert config.dataset.shape == (1, SIDE, SIDE)
    every = [np.asarray(Image.open(path))[None, None] for path in sorted((houses / "houses").rglob("*.png"))]
    mean, std = measure(every)
    assert config.dataset.mean == pytest.approx(mean, abs=1e-6)
    assert config.dataset.std == pytest.approx(std, abs=1e-6)
    prepare_data(config)


def test_they_train_abstain_and_nothing_is_written_where_they_lie(houses: Path, tmp_path: Path) -> None:
    before = listing(houses / "houses") | listing(houses / "common")
    run = train(written(houses, values_of(houses)), tmp_path / "run", serial=True)
    card = run.card()
    # A tenth of 60, 70, 80 and 90 rows, and ten at least.
    assert (card["abstention"]["rows"], card["abstention"]["clients"]) == (40, 4)
    assert card["temperature"] != 1
    figures = run.evaluate()
    assert "ood_auroc" not in figures
    assert figures["abstention"]["coverage_wanted"] == 0.95
    assert [info["client"] for info in json.loads((tmp_path / "run/clients.json").read_text())["clients"]] == list(
        NAMES
    )
    assert listing(houses / "houses") | listing(houses / "common") == before


def test_rows_that_are_elsewhere_are_asked_for_by_a_command_that_the_error_names(houses: Path) -> None:
    values = values_of(houses)
    values["clients"]["oslo"]["data"] = "/data/of/oslo"
    with pytest.raises(DataError, match=r"clients\.oslo\.data: .*not on this machine.*`fedppd data facts CONFIG`"):
        written(houses, values)


def test_images_of_two_sizes_name_the_client_and_the_remedy(houses: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(houses / "houses/rome/lower/patient-0.png")
    for path in (houses / "houses/rome").rglob("patient-3*"):
        path.unlink()
    with pytest.raises(DataError, match=r"rome: its images have shape \(1, 8, 8\), those of berlin \(1, 12, 12\)"):
        written(houses, values_of(houses))


def test_sums_are_all_that_a_client_says_and_can_be_read_back(houses: Path) -> None:
    sums = image_sums(houses / "houses/berlin", {"name": "folder"})
    text = write_image_sums(sums)
    assert read_image_sums(text.encode()) == sums
    assert "patient" not in text
    assert "berlin" not in text
    assert len(text) < 400  # whatever the number of rows


def test_tables_in_four_places_do_the_same(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in (*NAMES, "common/test"):
        path = tmp_path / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("age", "ward", "outcome"))
            for age, ward in zip(generator.normal(60, 12, 80), generator.integers(3, size=80), strict=True):
                writer.writerow((f"{age:.2f}", "abc"[ward], "ill" if age + 8 * (ward == 2) > 62 else "well"))
    before = listing(tmp_path)
    values = {
        "data": {"name": "table", "root": str(tmp_path / "common"), "table": {"target": "outcome"}},
        "federation": {"rounds": 2},
        "clients": {name: {"data": str(tmp_path / f"{name}.csv")} for name in NAMES},
    }
    (tmp_path.parent / "table.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path.parent / "table.yaml")
    assert config.client_names == list(NAMES)
    run = train(config, tmp_path.parent / "table-run", serial=True)
    assert run.card()["abstention"]["rows"] == 40
    assert listing(tmp_path) == before


# ---- what they are held against


def test_a_folder_of_ones_own_is_what_rows_are_held_against(houses: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    for row in range(7):
        (tmp_path / "odd").mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 20, 3)).astype(np.uint8)).save(tmp_path / f"odd/{row}.png")
    config = written(houses, values_of(houses, evaluation={"ood": str(tmp_path / "odd")}))
    rows = read_foreign(tmp_path / "odd", config.dataset, 5)
    assert rows.shape == (5, 1, SIDE, SIDE)
    assert spread(7, 5) == [0, 1, 2, 4, 5]
    run = train(config, tmp_path / "run", serial=True)
    assert 0 <= Run(run.location).evaluate()["ood_auroc"] <= 1


def test_a_path_that_is_not_there_is_missed_before_the_run(houses: Path) -> None:
    config = written(houses, values_of(houses, evaluation={"ood": "/no/such/place"}))
    with pytest.raises(DataError, match=r"evaluation\.ood: /no/such/place: no such file or folder"):
        prepare_data(config)


def test_a_score_that_is_chosen_needs_rows_of_the_coordinators(houses: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.score: auto is chosen on rows of the coordinator's"):
        written(houses, values_of(houses, evaluation={"score": "auto"}))


def test_few_rows_are_said_aloud(houses: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = values_of(houses, clients={name: {"data": str(houses / "houses" / name)} for name in NAMES[:1]})
    values["data"]["calibration"] = 0.2  # of 60: 12, and 95 % takes 19
    run = train(written(houses, values), tmp_path / "run", serial=True)
    assert caplog.text.count("NOTHING WILL ABSTAIN") == 1
    run.evaluate()
    assert caplog.text.count("NOTHING WILL ABSTAIN") == 2
    run.predict([next((houses / "common").rglob("*.png"))])
    assert caplog.text.count("NOTHING WILL ABSTAIN") == 3


def test_named_data_sets_keep_their_defaults() -> None:
    assert parse_config({}).data.calibration == 0
    assert parse_config({}).evaluation.ood == "glyphs"
