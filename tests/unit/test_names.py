"""Clients under names of their own: one seam, a fixed order, errors that name the remedy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedppd_ray.config.file import load_config, parse_config
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.errors import ConfigError
from fedppd_ray.sites.work import told_config

SECTIONS: dict[str, Any] = {"ward-b": {"cpus": 1}, "Klinik Süd": {}, "ward-a": {"data": "/rows/a"}}


def written(folder: Path, **values: Any) -> Config:
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "config.yaml")


def test_ids_made_of_numbers_are_the_default() -> None:
    assert parse_config({"federation": {"clients": 3}}).client_names == client_ids(3)
    with_wishes = {"client-01": {"cpus": 1}, "client-0*": {"gpus": 0}}
    assert parse_config({"federation": {"clients": 3}, "clients": with_wishes}).client_names == client_ids(3)


def test_names_are_sorted_whatever_the_file_has_and_count_the_clients(tmp_path: Path) -> None:
    config = written(tmp_path, clients=SECTIONS)
    assert config.client_names == ["Klinik Süd", "ward-a", "ward-b"]
    assert config.federation.clients == 3
    assert written(tmp_path, clients=dict(reversed(SECTIONS.items()))).client_names == config.client_names


def test_a_pattern_is_no_name_and_counts_for_the_names_it_matches(tmp_path: Path) -> None:
    config = written(tmp_path, clients={**SECTIONS, "ward-*": {"gpus": 0.5}})
    assert len(config.client_names) == 3
    assert config.overrides_for("ward-b").gpus == 0.5
    assert config.overrides_for("Klinik Süd").gpus is None


@pytest.mark.parametrize(
    ("clients", "federation", "message"),
    [
        (SECTIONS, {"clients": 4}, "federation.clients: 4, but clients has 3 with names of their own"),
        ({"clent-03": {"cpus": 1}}, {"clients": 10}, r"\(clent-03\); set it to 1, or name all of them"),
        ({"client-77": {"cpus": 1}}, {"clients": 10}, "clients.client-77: matches no client"),
        ({"a/../b": {}, "c": {}}, {}, "clients.a/../b: a client's name is of letters"),
        ({**SECTIONS, "word-*": {}}, {}, r"clients.word-\*: matches no client; they are called Klinik Süd to ward-b"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    tmp_path: Path, clients: dict[str, Any], federation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, clients=clients, federation=federation)


def folder_of(root: Path, names: list[str]) -> Path:
    for place in [*(f"clients/{name}" for name in names), "test"]:
        (root / place).mkdir(parents=True)
        np.save(root / place / "images.npy", np.arange(12 * 64, dtype=np.uint8).reshape(12, 8, 8))
        np.save(root / place / "labels.npy", np.arange(12) % 2)
    (root / "dataset.json").write_text('{"classes": ["no", "yes"]}')
    return root


def test_folders_give_clients_their_names(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", ["hospital-b", "hospital-a"])
    config = written(tmp_path, data={"name": "folder", "root": str(root)}, clients={"hospital-b": {"cpus": 1}})
    assert config.client_names == ["hospital-a", "hospital-b"]
    assert config.overrides_for("hospital-b").cpus == 1
    with pytest.raises(ConfigError, match=r"clients\.hospital-c: .* has no folder of this name"):
        written(tmp_path, data={"name": "folder", "root": str(root)}, clients={"hospital-c": {"cpus": 1}})


def test_folders_by_id_still_need_one_for_every_id(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", ["client-00", "client-02"])
    with pytest.raises(ConfigError, match="client-01 has no folder"):
        written(tmp_path, data={"name": "folder", "root": str(root)})


def test_a_site_is_told_no_other_name(tmp_path: Path) -> None:
    sites = {name: {"site": name} for name in ("hospital-a", "hospital-b")}
    told = told_config(written(tmp_path, clients=sites, data={"calibration": 10}))
    assert "hospital" not in str(told)
    again = parse_config({**told, "clients": {"hospital-b": {"data": "/rows"}}})
    assert again.client_names == ["hospital-b"]
