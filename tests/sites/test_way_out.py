"""The ways out of a house: a proxy that tunnels, a private authority, certificates on both sides, no network."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.sites import line as lines
from fedppd_ray.sites import wire
from fedppd_ray.sites.agent import join
from fedppd_ray.sites.coordinator import Listen, open_door, parse_listen
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.home import Home
from fedppd_ray.sites.line import AwayError, Line
from fedppd_ray.sites.mailbox import Mailbox
from fedppd_ray.sites.tls import Tls
from tests.sites.connect_proxy import ConnectProxy
from tests.sites.house import free_port, make_certificates


class Ways:
    """A coordinator's door over real TLS, and a site's folder."""

    def __init__(self, folder: Path, mutual: bool = False) -> None:
        self.folder, self.guests, self.home = folder, Guests(folder / "guests"), Home(folder / "home")
        self.home.init()
        self.ca, self.certificate, self.key = make_certificates(folder)
        self.box = Mailbox("a", "client-00", "ab" * 16, {"name": "x"}, 600.0)
        self.port = free_port()
        listen = Listen("127.0.0.1", self.port, self.certificate, self.key, folder, self.ca if mutual else None)
        self._door = open_door(listen, self.guests, {"a": self.box}, None)
        self._gateway = self._door.__enter__()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def join(self, tls: Tls) -> None:
        join(self.home, "a", self.url, self.guests.invite("a", 1.0), tls)

    def line(self) -> Line:
        joined = self.home.joined()
        return Line(joined.url, joined.name, self.home.key(), joined.coordinator, joined.tls())

    def close(self) -> None:
        self._gateway.heard.clear()
        self._door.__exit__(None, None, None)


@pytest.fixture
def ways(tmp_path: Path) -> Iterator[Ways]:
    made = Ways(tmp_path)
    yield made
    made.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    made = ConnectProxy()
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", made.url)
    yield made
    with contextlib.suppress(OSError):
        made.close()


def test_everything_goes_through_the_proxy_and_only_the_private_authority_is_believed(
    ways: Ways, proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--ca"):
        ways.join(Tls())
    ways.join(Tls(str(ways.ca)))
    line = ways.line()
    assert line.tell_once("/ask", wire.Ask(), wire.Answer).offer is None
    assert set(proxy.targets) == {f"127.0.0.1:{ways.port}"}
    line.close()
    proxy.close()
    with pytest.raises(AwayError):  # there is no other way
        ways.line().tell_once("/ask", wire.Ask(), wire.Answer)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert ways.line().tell_once("/ask", wire.Ask(), wire.Answer).offer is None


def test_a_network_that_is_gone_for_a_while_costs_that_while(
    ways: Ways, proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute of it, with processes: test_federation."""
    monkeypatch.setattr(lines, "_TIMEOUT", lines.httpx.Timeout(1.0))
    monkeypatch.setattr(wire, "PIECE", 2**18)
    ways.join(Tls(str(ways.ca)))
    numbers = np.arange(2**20, dtype=np.float32)
    answers: list = []
    ways.box.hear(wire.Ask())
    waiting = threading.Thread(target=lambda: answers.append(ways.box.ask(GlobalState(0, {"student": numbers}))))
    waiting.start()
    line = ways.line()
    offer = line.tell("/ask", wire.Ask(wait_s=5.0), wire.Answer).offer
    assert offer is not None
    body = wire.encode({"student": numbers + 1})
    sending = threading.Thread(target=lambda: line.send(body.content, body.blob, offer.task))
    sending.start()
    while line.sent < body.blob.size // 4:
        time.sleep(0.001)
    proxy.gone.set()
    time.sleep(2.5)
    assert sending.is_alive()
    proxy.gone.clear()
    sending.join(30)
    commit = wire.Commit(task=offer.task, digest=body.blob.digest, rows=10)
    assert line.tell("/commit", commit, wire.Done, offer.task).state == "accepted"
    waiting.join(10)
    assert (answers[0].models["student"] == numbers + 1).all()
    assert proxy.lost > 0


def test_with_mutual_tls_nobody_without_a_certificate_is_heard(tmp_path: Path) -> None:
    ways = Ways(tmp_path, mutual=True)
    with pytest.raises(ConfigError, match="no coordinator answers"):
        ways.join(Tls(str(ways.ca)))
    with pytest.raises(ConfigError, match="--cert "):
        ways.join(Tls(str(ways.ca), str(tmp_path / "none.pem"), str(ways.key)))
    ways.guests.remove("a")
    ways.join(Tls(str(ways.ca), str(ways.certificate), str(ways.key)))
    assert ways.line().tell_once("/ask", wire.Ask(), wire.Answer).offer is None  # as its folder remembers it
    ways.close()


def test_a_missing_authority_of_the_sites_is_named(tmp_path: Path) -> None:
    _, certificate, key = make_certificates(tmp_path)
    with pytest.raises(ConfigError, match="--tls-client-ca"):
        parse_listen("127.0.0.1:8443", certificate, key, tmp_path, tmp_path / "none.pem")
