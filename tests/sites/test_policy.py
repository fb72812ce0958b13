"""What a site takes part in, what it lets go, and what it writes down."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedppd_ray.config.file import parse_config
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.per_client import per_client
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.sites import wire
from fedppd_ray.sites.home import AUDIT, Home, Spooled
from fedppd_ray.sites.policy import TEMPLATE, Policy, load_policy, parse_policy
from fedppd_ray.sites.work import Rows, taken_config, told_config

CONFIG = parse_config({"name": "x", "federation": {"clients": 3}, "clients": {"client-00": {"site": "hospital-a"}}})


def test_the_template_is_the_default_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(TEMPLATE)
    assert load_policy(tmp_path / "policy.yaml") == Policy()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"methods": ["fedavg"]}, "methods: fedppd"),
        ({"networks": ["mnist_teacher"]}, "networks: mnist_student"),
        ({"most_epochs": 4}, "most_epochs: 4"),
        ({"most_rounds": 3}, "most_rounds: 3"),
        ({"fewest_rows": 51}, "fewest_rows: 51"),
        ({"most_releases": 7}, "most_releases: 7"),
        ({"transforms": ["clip"]}, "transforms"),
    ],
)
def test_a_policy_says_no_and_why(values: dict, reason: str) -> None:
    assert Policy().refusal(CONFIG, 50, 7) is None
    assert str(parse_policy(values, "p").refusal(CONFIG, 50, 7)).startswith(reason)


@pytest.mark.parametrize("values", [{"most_epoch": 3}, {"rows": 0}, {"rows": "some"}, {"class_counts": 3}, []])
def test_a_mistake_in_a_policy_is_named(values: object) -> None:
    with pytest.raises(ConfigError, match=r"^p: "):
        parse_policy(values, "p")


@given(st.integers(1, 10**7))
def test_row_counts_leave_as_the_policy_says(rows: int) -> None:
    assert Policy().told_rows(rows) == rows
    assert Policy(rows=700).told_rows(rows) == 700
    told = Policy(rows="rounded").told_rows(rows)
    assert told >= 10
    assert len(str(told).rstrip("0")) <= 2
    assert abs(told - rows) <= max(10, 0.06 * rows)


def test_a_foreign_configuration_cannot_choose_the_rows(tmp_path: Path) -> None:
    told = told_config(CONFIG)
    assert "clients" not in told
    evil = {**told, "clients": {"client-00": {"data": "/etc"}}, "data": {**told["data"], "root": "/etc"}}
    taken = taken_config(evil, "client-00", Rows(tmp_path))
    assert taken.overrides_for("client-00").data == str(tmp_path)
    assert taken.data.root is None
    for client in ("client-99", "*", "client-0?"):
        with pytest.raises(ConfigError):
            taken_config(told, client, Rows(tmp_path))


def test_a_foreign_configuration_runs_no_code(tmp_path: Path) -> None:

    evil = {**told_config(CONFIG), "teacher": {"network": "antigravity:Net"}}
    with pytest.raises(ConfigError, match="code outside of fedppd"):
        taken_config(evil, "client-00", Rows(tmp_path))
    assert "antigravity" not in sys.modules


def test_one_site_is_one_client_and_decides_for_itself() -> None:
    for clients, text in (
        ({"client-0*": {"site": "a"}}, "already"),
        ({"client-00": {"site": "a", "data": "/x"}}, "decides that itself"),
        ({"client-00": {"site": "A b"}}, "site"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse_config({"federation": {"clients": 3}, "clients": clients})


# ---- the house


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.init()
    return made


def test_the_audit_log_shows_that_it_was_changed(home: Home) -> None:
    for round_id in range(3):
        home.record("update", round=round_id, digest=str(round_id), bytes=1)
    home.record("update", round=2, digest="2", bytes=1)  # sent again
    assert home.updates_released() == 3
    path = home.folder / AUDIT
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        home.releases()
    path.write_text("\n".join(lines) + '\n{"time": "2030')  # torn by a power cut
    home.record("joined")
    assert [json.loads(line)["what"] for line in path.read_text().splitlines()][-1] == "joined"
    assert len(home.releases()) == 5


def test_an_update_is_kept_for_its_own_work_only(home: Home) -> None:
    home.spool(Spooled("work", b"weights", 30, {"loss": 1.0}))
    assert home.spooled("work") == Spooled("work", b"weights", 30, {"loss": 1.0})
    assert home.spooled("other") is None
    (home.folder / "spool" / "update.safetensors").write_bytes(b"damaged")
    assert home.spooled("work") is None


def test_a_worker_is_kept_as_long_as_rows_do_not_change(tmp_path: Path) -> None:
    (tmp_path / "images.npy").write_bytes(b"1")
    before = Rows(tmp_path).fingerprint()
    assert Rows(tmp_path).fingerprint() == before
    (tmp_path / "images.npy").write_bytes(b"22")
    assert Rows(tmp_path).fingerprint() != before


# ---- versions


@pytest.mark.parametrize(
    ("text", "refused"), [("1.0", False), ("1.99", False), ("2.0", True), ("0.9", True), ("x", True)]
)
def test_only_the_first_number_of_the_version_must_agree(text: str, refused: bool) -> None:
    assert (wire.version_refusal(text) is not None) == refused


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    assert wire.Wanted.model_validate_json('{"wanted": true, "mood": "good"}').wanted


def test_figures_per_client_leave_out_sites_that_keep_their_class_counts() -> None:
    log_p, labels = np.log(np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]])), np.array([0, 1, 1])
    told, kept = ClientInfo("client-00", 8, (2, 6)), ClientInfo("client-01", 30, ())
    assert per_client(log_p, labels, [kept, told]) == per_client(log_p, labels, [told])
    assert per_client(log_p, labels, [kept]) == {}
