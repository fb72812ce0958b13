import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from fedppd_ray.data.datasets import load
from serve.app import create_app
from serve.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from tests.service.exports import trained_digits, untrained_colour

# Other processes of the tests need cores too, and threads that wait for each other crawl on a busy machine.
torch.set_num_threads(1)

Client = Callable[..., TestClient]


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read it, never write into it: tests that write take `own_run`."""
    run = tmp_path_factory.mktemp("service") / "digits"
    trained_digits(run)
    return run


@pytest.fixture(scope="session")
def colour_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("service") / "colours"
    untrained_colour(run)
    return run


@pytest.fixture
def own_run(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def digits() -> Any:
    """(images, labels) of the held-out digits."""
    return load("mnist5k", None).test


@pytest.fixture
def open_client() -> Iterator[Client]:
    """Makes HTTP clients of the application on a run, with settings of one's own."""
    clients: list[TestClient] = []

    def make(run: Path, **settings: Any) -> TestClient:
        made = Settings(run=str(run), **settings)
        client = TestClient(create_app(Predictor(made, Metrics()), made), raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__()


@pytest.fixture(scope="session")
def client(digits_run: Path) -> Iterator[TestClient]:
    settings = Settings(run=str(digits_run))
    app = create_app(Predictor(settings, Metrics()), settings)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def png(pixels: Any, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(stream, format=kind)
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()
