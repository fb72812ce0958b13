from collections.abc import Iterator
from pathlib import Path

import pytest

from fedppd_ray.api import train
from fedppd_ray.config.file import load_config
from fedppd_ray.runs.signature import Key
from tests.sites.house import House, digest


@pytest.fixture
def key(tmp_path: Path) -> Key:
    """A site's."""
    return Key.make(tmp_path / "site.key")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The student of the same rows in folders, without sites: what every other way must give, bit for bit."""
    folder = tmp_path_factory.mktemp("reference")
    house = House(folder)
    train(load_config(str(house.config(sites=())), []), folder / "run", serial=True)
    return digest(folder / "run")
