"""Weights over a line that breaks: they arrive, and little is sent twice."""

import threading
from pathlib import Path

import numpy as np
import pytest

from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.signature import Key
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.coordinator import Listen, open_door
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.line import Line, RefusedError
from fedppd_ray.sites.mailbox import Mailbox
from fedppd_ray.sites.tls import Tls
from tests.sites.bad_line import BadLine
from tests.sites.house import free_port, make_certificates


class Ends:
    """A coordinator's door with one mailbox, and a site's line to it through a bad proxy."""

    def __init__(self, folder: Path, lifetime_s: float, rate: float) -> None:
        self.ca, certificate, key = make_certificates(folder)
        self.guests, self.site = Guests(folder / "guests"), Key.make(folder / "site.key")
        code = self.guests.invite("a", 1.0)
        self.guests.join("a", self.site.public, identity.proof(code, "a", self.site.public))
        self.box = Mailbox("a", "client-00", "ab" * 16, {"name": "x"}, 600.0)
        port = free_port()
        self.door = open_door(Listen("127.0.0.1", port, certificate, key, folder), self.guests, {"a": self.box}, None)
        self.gateway = self.door.__enter__()
        self.proxy = BadLine(port, certificate, key, self.ca, lifetime_s, rate)
        self.line = self.connect()

    def connect(self) -> Line:
        url = f"https://127.0.0.1:{self.proxy.port}"
        return Line(url, "a", self.site, self.guests.key().public, Tls(str(self.ca)))

    def close(self) -> None:
        self.gateway.heard.clear()
        self.proxy.close()
        self.door.__exit__(None, None, None)


def carried(folder: Path, megabytes: int, lifetime_s: float, rate: float) -> None:
    """There and back, over a line each of whose connections lives so long."""
    ends = Ends(folder, lifetime_s, rate)
    numbers = np.random.Generator(np.random.PCG64(1)).random(megabytes * 250_000).astype(np.float32)
    state = GlobalState(0, {"student": numbers})
    answers: list = []
    ends.box.hear(wire.Ask())
    waiting = threading.Thread(target=lambda: answers.append(ends.box.ask(state)), daemon=True)
    waiting.start()
    offer = None
    while offer is None:
        offer = ends.line.tell("/ask", wire.Ask(wait_s=1.0), wire.Answer).offer
    fetched = ends.line.fetch(offer.state, offer.task, 10**9)
    assert (wire.decode(fetched)["student"] == numbers).all()
    body = wire.encode({"student": numbers + 1})
    before, carried_before = ends.proxy.breaks, ends.proxy.carried
    ends.line.send(body.content, body.blob, offer.task)
    breaks = ends.proxy.breaks - before + 1  # the first may have come before, and be noticed only now
    assert breaks > 2, "the line was not bad enough to show anything"
    assert body.blob.size <= ends.proxy.carried - carried_before < body.blob.size + breaks * wire.PIECE
    commit = wire.Commit(task=offer.task, digest=body.blob.digest, rows=10)
    # "repeated": it was accepted, and that answer was lost on the way.
    assert ends.line.tell("/commit", commit, wire.Done, offer.task).state in ("accepted", "repeated")
    waiting.join(10)
    assert (answers[0].models["student"] == numbers + 1).all()
    ends.close()


def test_12_megabytes_over_a_line_that_breaks_twice_a_second(tmp_path: Path) -> None:
    carried(tmp_path, 12, 0.4, 10e6)


@pytest.mark.long
def test_200_megabytes_over_a_line_that_breaks_every_few_seconds(tmp_path: Path) -> None:
    carried(tmp_path, 200, 3.0, 12e6)


def test_an_upload_goes_on_where_a_killed_site_stopped_and_the_proxy_can_do_nothing_with_what_it_reads(
    tmp_path: Path,
) -> None:
    ends = Ends(tmp_path, 60.0, 1e9)
    ends.box.hear(wire.Ask())
    state = GlobalState(0, {"student": np.zeros(10, np.float32)})
    threading.Thread(target=lambda: ends.box.ask(state), daemon=True).start()
    offer = ends.line.tell("/ask", wire.Ask(wait_s=5.0), wire.Answer).offer
    assert offer is not None
    content = bytes(9 * 2**20)
    blob = wire.Blob(digest=wire.digest_of(content), size=len(content))
    ends.line.tell("/updates", wire.Announce(task=offer.task, blob=blob), wire.Have, offer.task)
    path = f"/updates/{blob.digest}?offset=0&attempt=1"
    ends.line._once("PUT", path, content[: wire.PIECE], offer.task)
    again = ends.connect()  # a new process, which knows nothing of the first
    again.send(content, blob, offer.task)
    assert again.sent == len(content) - wire.PIECE
    assert b"fedppd-signature" in bytes(ends.proxy.read).lower()  # it does read
    other = Line(f"https://127.0.0.1:{ends.proxy.port}", "a", Key.make(tmp_path / "x.key"), ends.guests.key().public,
                 Tls(str(ends.ca)))  # fmt: skip
    with pytest.raises(RefusedError, match="signature"):
        other.tell_once("/ask", wire.Ask(), wire.Answer)
    ends.close()


def test_a_site_with_a_wrong_clock_puts_itself_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(tmp_path, 60.0, 1e9)
    real = identity.time.time
    monkeypatch.setattr("fedppd_ray.sites.line.time", type("Clock", (), {"time": staticmethod(lambda: real() - 3600)}))
    assert ends.line.tell_once("/ask", wire.Ask(), wire.Answer).offer is None
    ends.close()
