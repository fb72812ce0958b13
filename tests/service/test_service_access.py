"""Who may call, and where the service may listen."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedppd_ray.errors import ConfigError
from serve.settings import check_exposure, read_token_digest, token_digest, token_fits
from tests.service.conftest import Client

IMAGE = {"instances": [[[0] * 28] * 28]}
TENSOR = {"inputs": [{"name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": [0] * 784}]}


@pytest.mark.parametrize(("path", "body"), [("/predict", IMAGE), ("/v2/models/digits/infer", TENSOR)])
def test_prediction_needs_the_token_when_one_is_set(
    open_client: Client, digits_run: Path, path: str, body: Any
) -> None:
    client = open_client(digits_run, token_sha256=token_digest("open-sesame"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
        refused = client.post(path, json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert client.post(path, json=body, headers={"Authorization": "Bearer open-sesame"}).status_code == 200


def test_health_and_card_need_no_token(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, token_sha256=token_digest("open-sesame"))
    for path in ("/", "/model", "/healthz", "/readyz", "/v2/health/ready"):
        assert client.get(path).status_code == 200


def test_token_is_compared_whole() -> None:
    digest = token_digest("open-sesame")
    assert token_fits("open-sesame", digest)
    for wrong in ("", "open", "open-sesame2", "OPEN-SESAME", "öpen"):
        assert not token_fits(wrong, digest)


def test_token_comes_from_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_token_digest({}) is None
    assert read_token_digest({"FEDPPD_TOKEN": "secret"}) == token_digest("secret")
    assert read_token_digest({"FEDPPD_TOKEN": "secret"}, file) == token_digest("from-file")
    assert read_token_digest({"FEDPPD_TOKEN_FILE": str(file)}) == token_digest("from-file")


def test_an_empty_or_unreadable_token_is_refused_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for environment, file in (
        ({"FEDPPD_TOKEN": ""}, None),
        ({}, tmp_path / "empty"),
        ({}, tmp_path / "missing"),
        ({"FEDPPD_TOKEN": "two words"}, None),
    ):
        with pytest.raises(ConfigError):
            read_token_digest(environment, file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_listening_beyond_this_machine_needs_a_token_or_insistence(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check_exposure(host, None, insecure=False)
    check_exposure(host, None, insecure=True)
    check_exposure(host, token_digest("t"), insecure=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(host, None, insecure=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--token-file", "no-such-file"], "no-such-file"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(digits_run: Path, arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "fedppd_ray", "serve", str(digits_run), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_without_an_export_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedppd_ray", "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "finished run" in done.stderr
