"""Keys, signatures, invitations and the door: small, in one process."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedppd_ray.cli.app import app
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.runs.export import read_card
from fedppd_ray.runs.signature import TRUSTED, Key, export_refusal, require_trusted, sign_export, trusted_key, verified
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.identity import FRESH_S, Doorkeeper, Request, host_of, new_code, proof
from fedppd_ray.sites.incoming import Incoming
from fedppd_ray.sites.wire import Blob, WireError, digest_of
from tests.service.exports import untrained_table
from tests.sites.door import Clock


@pytest.fixture
def coordinator(tmp_path: Path) -> Key:
    return Key.make(tmp_path / "coordinator.key")


def test_a_key_is_its_owners_alone_and_is_never_replaced(tmp_path: Path, key: Key) -> None:
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600
    assert Key.load(tmp_path / "site.key").public == key.public
    with pytest.raises(ConfigError, match="already"):
        Key.make(tmp_path / "site.key")


REQUEST = Request("POST", "/v1/ask", b"{}", "a", "1000000.000", "0" * 32, "f" * 32, "1")


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"}, {"path": "/v1/fail"}, {"body": b"{} "}, {"site": "b"}, {"time": "1000001.000"},
        {"nonce": "1" * 32}, {"run": "e" * 32}, {"round": "2"},
    ],
)  # fmt: skip
def test_a_signature_covers_everything(key: Key, coordinator: Key, change: dict) -> None:
    door = Doorkeeper(coordinator.public, lambda: {"a": key.public, "b": key.public}, Clock())
    signature = key.sign(REQUEST.text(coordinator.public))
    assert door.refusal(replace(REQUEST, **change), signature) == "the signature does not fit"
    assert door.refusal(REQUEST, signature) is None


def test_a_request_for_another_coordinator_is_refused(key: Key, coordinator: Key) -> None:
    door = Doorkeeper(coordinator.public, lambda: {"a": key.public}, Clock())
    assert door.refusal(REQUEST, key.sign(REQUEST.text(key.public))) == "the signature does not fit"


def test_the_door_refuses_repeats_strangers_and_what_is_stale(key: Key, coordinator: Key) -> None:
    clock, known = Clock(), {"a": key.public}
    door = Doorkeeper(coordinator.public, lambda: known, clock)

    def ask(**change: str) -> str | None:
        request = replace(REQUEST, **change)
        return door.refusal(request, key.sign(request.text(coordinator.public)))

    assert ask() is None
    assert ask() == "seen before"
    assert ask(site="c") == "no site of this name"
    assert "clock" in str(ask(time="999999.000", nonce="1" * 32))  # before this process began
    assert "clock" in str(ask(time="nan", nonce="2" * 32))
    clock.now += FRESH_S
    assert ask(nonce="3" * 32) is None
    assert ask(nonce="4" * 32, time=f"{clock.now + FRESH_S:.3f}") is None
    assert "clock" in str(ask(nonce="5" * 32, time=f"{clock.now + FRESH_S + 0.01:.3f}"))
    clock.now += 0.01
    assert "clock" in str(ask(nonce="6" * 32))
    known.clear()
    assert ask(time="1000200.000", nonce="7" * 32) == "no site of this name"


def test_seen_nonces_are_forgotten_once_they_are_stale(key: Key, coordinator: Key) -> None:
    clock = Clock()
    door = Doorkeeper(coordinator.public, lambda: {"a": key.public}, clock)
    for number in range(300):
        clock.now += 1
        request = replace(REQUEST, time=f"{clock.now:.3f}", nonce=f"{number:032x}")
        assert door.refusal(request, key.sign(request.text(coordinator.public))) is None
    assert len(door._seen) < 200


def test_an_invitation_is_good_once_for_one_name_and_expires(tmp_path: Path, key: Key) -> None:
    clock = Clock()
    guests = Guests(tmp_path / "guests", clock)
    code = guests.invite("hospital-a", 1.0)
    assert guests.key().public.startswith(host_of(code))
    shown = proof(code, "hospital-a", key.public)
    assert guests.join("hospital-b", key.public, proof(code, "hospital-b", key.public)) is not None
    assert guests.join("hospital-a", "0" * 64, shown) == "the code does not fit"  # another key cannot be put in
    assert guests.join("hospital-a", key.public, shown) is None
    assert guests.keys() == {"hospital-a": key.public}
    assert guests.join("hospital-a", key.public, shown) is None  # an answer that was lost on the way
    assert guests.join("hospital-a", "0" * 64, proof(code, "hospital-a", "0" * 64)) == "this name is taken"
    late = guests.invite("hospital-c", 1.0)
    clock.now += 3601
    assert "expired" in str(guests.join("hospital-c", key.public, proof(late, "hospital-c", key.public)))
    guests.remove("hospital-a")
    assert Guests(tmp_path / "guests").keys() == {}


def test_names_are_no_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a–z"):
        Guests(tmp_path).invite("../a", 1.0)


@pytest.mark.parametrize(
    "code", ["", "abc", "a" * 40, new_code("ab" * 32)[:-1]], ids=lambda code: f"{len(code)} characters"
)
def test_half_a_code_is_refused_before_anything_is_sent(code: str) -> None:
    if len(code) == 40:
        assert host_of(code)
    else:
        with pytest.raises(ConfigError, match="invitation"):
            host_of(code)


# ---- exports


def test_a_changed_card_or_another_signer_is_refused(tmp_path: Path, key: Key, coordinator: Key, monkeypatch) -> None:
    (tmp_path / "student").mkdir()
    card = tmp_path / "student" / "model.json"
    card.write_text('{"sha256": "abc"}')
    assert "not signed" in str(export_refusal(card.read_bytes(), None, key.public))
    with pytest.raises(CheckpointError, match="not signed"):
        require_trusted(tmp_path, card.read_bytes(), key.public)
    sign_export(tmp_path, key)
    require_trusted(tmp_path, card.read_bytes(), key.public)
    with pytest.raises(CheckpointError, match="was changed"):
        require_trusted(tmp_path, card.read_bytes() + b" ", key.public)
    with pytest.raises(CheckpointError, match="not by"):
        require_trusted(tmp_path, card.read_bytes(), coordinator.public)
    monkeypatch.setenv("FEDPPD_TRUSTED_KEY", "abc")
    with pytest.raises(ConfigError, match="FEDPPD_TRUSTED_KEY"):
        trusted_key()


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80), st.binary(max_size=20), st.text(max_size=140))
def test_no_garbage_verifies_or_raises(public: str, message: bytes, signature: str) -> None:
    assert not verified(public, message, signature)


# ---- updates on their way in


@settings(max_examples=60, deadline=None)
@given(content=st.binary(min_size=1, max_size=2000), cuts=st.lists(st.integers(1, 500), max_size=8), data=st.data())
def test_an_upload_in_any_pieces_with_repeats_arrives_whole(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cuts: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("incoming")
    blob = Blob(digest=digest_of(content), size=len(content))
    place = Incoming(folder)
    assert place.append("a", blob.digest, 0, content) is None  # not announced
    have = place.have("a", blob)
    for cut in [*cuts, len(content)]:
        if data.draw(st.booleans()):  # a piece that comes twice, or out of place, changes nothing
            wrong = data.draw(st.integers(0, len(content) + 5))
            if wrong != have:
                assert place.append("a", blob.digest, wrong, content[:cut]) == have
        if have < len(content):
            with_rest = Incoming(folder)  # a coordinator that was restarted
            have = with_rest.append("a", blob.digest, have, content[have : have + cut]) or 0
    while have < len(content):
        have = place.append("a", blob.digest, have, content[have:]) or 0
    assert place.take("a", blob.digest) == content


def test_wrong_bytes_are_found_at_the_end_and_another_site_has_none(tmp_path: Path) -> None:
    place, blob = Incoming(tmp_path), Blob(digest=digest_of(b"right"), size=5)
    place.have("a", blob)
    place.append("a", blob.digest, 0, b"wrong")
    with pytest.raises(WireError, match="digest"):
        place.take("a", blob.digest)
    with pytest.raises(WireError, match="not announced"):
        place.take("b", blob.digest)


def test_who_trusts_a_key_alone_can_still_sign_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untrained_table(tmp_path / "run")
    guests = tmp_path / "coordinator"
    monkeypatch.setenv(TRUSTED, Guests(guests).key().public)
    with pytest.raises(CheckpointError, match="is not signed"):
        read_card(tmp_path / "run")
    done = CliRunner().invoke(app, ["keys", "sign", str(tmp_path / "run"), "--sites", str(guests)])
    assert done.exit_code == 0, done.output
    assert read_card(tmp_path / "run")["name"] == "patients"
