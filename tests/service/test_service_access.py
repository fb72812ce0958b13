"""Who may call, and where the service may listen."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedppd_ray.errors import ConfigError
from serve.access_log import WithRequest
from serve.settings import check_exposure, check_ray_authentication
from serve.tokens import Tokens, read_tokens, token_digest
from tests.service.conftest import Client

IMAGE = {"instances": [[[0] * 28] * 28]}
TENSOR = {"inputs": [{"name": "image", "shape": [1, 28, 28], "datatype": "FP32", "data": [0] * 784}]}


@pytest.mark.parametrize(("path", "body"), [("/predict", IMAGE), ("/v2/models/digits/infer", TENSOR)])
def test_prediction_needs_the_token_when_one_is_set(
    open_client: Client, digits_run: Path, path: str, body: Any
) -> None:
    client = open_client(digits_run, tokens={"default": token_digest("open-sesame")})
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
        refused = client.post(path, json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert client.post(path, json=body, headers={"Authorization": "Bearer open-sesame"}).status_code == 200


def test_health_and_card_need_no_token(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, tokens={"default": token_digest("open-sesame")})
    for path in ("/", "/model", "/healthz", "/readyz", "/v2/health/ready"):
        assert client.get(path).status_code == 200


def test_token_is_compared_whole() -> None:
    tokens = Tokens({"default": token_digest("open-sesame")}, None)
    assert tokens.owner("open-sesame") == "default"
    for wrong in ("", "open", "open-sesame2", "OPEN-SESAME", "öpen"):
        assert tokens.owner(wrong) is None


def test_token_comes_from_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_tokens({}) == {}
    assert read_tokens({"FEDPPD_TOKEN": "secret"}) == {"default": token_digest("secret")}
    assert read_tokens({"FEDPPD_TOKEN": "secret"}, file) == {"default": token_digest("from-file")}
    assert read_tokens({"FEDPPD_TOKEN_FILE": str(file)}) == {"default": token_digest("from-file")}
    file.write_text("# who may call\nward-3  abc\nlab def\n\n")
    assert read_tokens({}, file) == {"ward-3": token_digest("abc"), "lab": token_digest("def")}


def test_an_empty_or_unreadable_token_is_refused_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "twice").write_text("lab a\nlab b\n")
    (tmp_path / "three").write_text("lab a b\n")
    (tmp_path / "odd").write_text("la/b a\n")
    for environment, file in (
        ({"FEDPPD_TOKEN": ""}, None),
        ({}, tmp_path / "empty"),
        ({}, tmp_path / "missing"),
        ({"FEDPPD_TOKEN": "two words"}, None),
        ({}, tmp_path / "twice"),
        ({}, tmp_path / "three"),
        ({}, tmp_path / "odd"),
    ):
        with pytest.raises(ConfigError):
            read_tokens(environment, file)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_listening_beyond_this_machine_needs_a_token_or_insistence(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check_exposure(host, False, insecure=False)
    check_exposure(host, False, insecure=True)
    check_exposure(host, True, insecure=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(host, False, insecure=False)


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


def test_a_ray_that_anyone_may_command_is_refused_unless_one_insists(digits_run: Path) -> None:
    command = [sys.executable, "-m", "fedppd_ray", "serve", str(digits_run)]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "RAY_AUTH_MODE" in done.stderr
    assert "--insecure" in done.stderr
    check_ray_authentication({"RAY_AUTH_MODE": "disabled"}, insecure=True)
    unset: dict[str, str] = {}
    check_ray_authentication(unset, insecure=False)
    assert unset == {"RAY_AUTH_MODE": "token"}, "Ray's default depends on files in the home folder"


def test_a_folder_without_an_export_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedppd_ray", "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "finished run" in done.stderr


def test_tokens_have_names_and_change_while_serving(open_client: Client, digits_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("ward old-secret\nlab lab-secret\n")
    client = open_client(digits_run, tokens=read_tokens({}, file), token_file=str(file), poll_seconds=0.02)

    def status(token: str) -> int:
        return client.post("/predict", json=IMAGE, headers={"Authorization": f"Bearer {token}"}).status_code

    assert [status("old-secret"), status("lab-secret"), status("new-secret")] == [200, 200, 401]
    (tmp_path / "next").write_text("ward new-secret\nlab lab-secret\n")
    (tmp_path / "next").replace(file)
    deadline = time.monotonic() + 10
    while client.app.state.tokens.owner("new-secret") is None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [status("new-secret"), status("lab-secret"), status("old-secret")] == [200, 200, 401]
    file.write_text("")  # broken: nobody is locked out, and nobody let in
    time.sleep(0.2)
    assert [status("new-secret"), status("")] == [200, 401]
    assert 'fedppd_token_requests_total{token="lab"} 2.0' in client.get("/metrics").text


def test_guessing_tokens_is_slowed_down(open_client: Client, digits_run: Path) -> None:
    client = open_client(
        digits_run,
        tokens={"default": token_digest("right")},
        client_header="x-client",
        failed_logins_a_second=0.01,
    )

    def ask(token: str, address: str) -> Any:
        headers = {"Authorization": f"Bearer {token}", "X-Client": address}
        return client.post("/predict", json=IMAGE, headers=headers)

    assert [ask("wrong", "10.0.0.1").status_code for _ in range(12)] == [401] * 10 + [429] * 2
    held = ask("right", "10.0.0.1")
    assert (held.status_code, held.json()["error"]["code"]) == (429, "too_often")
    assert 0 < int(held.headers["Retry-After"]) <= 100
    assert ask("right", "10.0.0.2").status_code == 200, "others are not held up"


def test_one_address_has_its_share_of_requests(open_client: Client, digits_run: Path) -> None:
    client = open_client(digits_run, client_header="x-client", client_requests_a_second=0.5)

    def status(address: str) -> int:
        return client.post("/predict", json=IMAGE, headers={"X-Client": address}).status_code

    assert [status("10.0.0.1") for _ in range(3)] == [200, 429, 429]
    assert status("10.0.0.2") == 200
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("ward-3.42:7", True), ("two words", False), ("x" * 129, False), ("<script>", False), (None, False)],
)
def test_a_request_id_is_checked_and_sent_back(
    open_client: Client, digits_run: Path, given: str | None, kept: bool
) -> None:
    client = open_client(digits_run)
    sent = client.get("/healthz", headers={"X-Request-Id": given} if given else {}).headers.get_list("x-request-id")
    assert len(sent) == 1
    assert (sent[0] == given) is kept
    assert re.fullmatch("[A-Za-z0-9.:-]{1,128}", sent[0])


def test_every_request_is_a_line_of_the_access_log(open_client: Client, digits_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    tokens = {"ward": token_digest("right")}
    client = open_client(digits_run, tokens=tokens, access_log=str(file), client_header="x-client")
    headers = {"Authorization": "Bearer right", "X-Request-Id": "abc", "X-Client": "10.0.0.9"}
    client.post("/predict", json=IMAGE, headers=headers)
    client.post("/predict", json=IMAGE)
    client.__exit__()
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["id"], first["client"], first["token"], first["status"]) == ("abc", "10.0.0.9", "ward", 200)
    assert (first["method"], first["path"]) == ("POST", "/predict")
    assert first["milliseconds"] > 0
    assert (second["token"], second["status"]) == (None, 401)
    assert "right" not in file.read_text()


def test_log_lines_carry_the_request(open_client: Client, digits_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(WithRequest())
    client = open_client(digits_run)
    client.app.add_api_route("/broken", lambda: 1 / 0)  # type: ignore[attr-defined]
    answer = client.get("/broken", headers={"X-Request-Id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
    assert [record.request for record in caplog.records if "a request failed" in record.message] == ["abc"]
