"""`serve run` with the config file in serve/: the same application by import path, behind Ray's own proxy."""

import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from tests.service.conftest import npy
from tests.service.live import HEADERS, TOKEN, Server, free_port, running

SHIPPED = Path(__file__).parents[2] / "serve" / "config.yaml"
NPY = {"Content-Type": "application/x-npy", **HEADERS}


@pytest.fixture(scope="module")
def server(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("config")
    port = free_port()
    config = yaml.safe_load(SHIPPED.read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] |= {"run": str(digits_run), "max_pending": 2}
    # One replica: which of several would be overloaded is the proxy's choice.
    application["deployments"][0]["autoscaling_config"]["max_replicas"] = 1
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    # "local": without it, `serve run` joins whatever Ray it finds on the machine, which is somebody else's.
    command = [
        sys.executable,
        str(Path(sysconfig.get_path("scripts")) / "serve"),
        "run",
        "--address",
        "local",
        str(file),
    ]
    with running(command, port, digits_run, folder / "log", FEDPPD_TOKEN=TOKEN) as server:
        yield server


def test_the_config_file_serves_with_the_token_of_the_environment(server: Server) -> None:
    body = npy(np.zeros((2, 28, 28), np.uint8))
    assert httpx.post(f"{server.url}/predict", content=body, headers=NPY, timeout=30).status_code == 200
    assert (
        httpx.post(f"{server.url}/predict", content=body, headers={"Content-Type": NPY["Content-Type"]}).status_code
        == 401
    )
    assert httpx.get(f"{server.url}/model").json()["reload"]["watching"] is True


def test_overload_answers_503_with_retry_after_and_recovers(server: Server) -> None:
    body = npy(np.zeros((3000, 28, 28), np.uint8))

    def send(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/predict", content=body, headers=NPY, timeout=60)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(send, range(10)))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 503}
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)
    assert send(0).status_code == 200
