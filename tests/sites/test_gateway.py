"""The door: work goes out, weights come in once, and each site reaches its own mailbox only."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.runs.signature import Key
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.mailbox import Mailbox, SiteLostError, SiteRefusedError
from tests.sites.door import RUN, STATE, Door, dumped


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    yield made
    made.close()


def upload(door: Door, body: wire.Body, site: str = "a") -> tuple[int, dict[str, Any]]:
    announce = dumped(task=door.task(), blob=body.blob.model_dump())
    assert door.send("POST", "/updates", announce, site)[0] == 200
    path = f"/updates/{body.blob.digest}?offset=0&attempt=1"
    assert door.send("PUT", path, body.content, site) == (200, {"have": len(body.content)})
    return door.send("POST", "/commit", dumped(task=door.task(), digest=body.blob.digest, rows=30), site)


def test_work_goes_out_and_weights_come_in_once(own: Door) -> None:
    status, answer = own.send("POST", "/ask", dumped(rows=30))
    offer = wire.Answer.model_validate(answer).offer
    assert (status, offer is not None and offer.task.round) == (200, 1)
    assert own.boxes["a"].info() is not None
    assert (
        own.send("GET", f"/bodies/{offer.state.digest}?offset=0&size=9999999")[1]["bytes"]
        == wire.encode(STATE.models).content
    )
    body = wire.encode({"student": np.ones(1000, np.float32)})
    assert upload(own, body) == (200, {"state": "accepted"})
    own.threads[0].join(5)
    assert own.answers["a"].receipt.rows == 30
    assert (own.answers["a"].models["student"] == 1).all()
    commit = dumped(task=own.task(), digest=body.blob.digest, rows=30)
    assert own.send("POST", "/commit", commit) == (200, {"state": "repeated"})
    assert own.send("POST", "/commit", dumped(task=own.task(), digest="0" * 64, rows=30))[0] == 409
    assert "b" not in own.answers


def test_a_refusal_reaches_the_round(own: Door) -> None:
    body = dumped(task=own.task(), reason="its policy says no: most_epochs: 4", refused=True)
    assert own.send("POST", "/fail", body) == (200, {"wanted": True})
    own.threads[0].join(5)
    assert isinstance(own.answers["a"], SiteRefusedError)
    assert "most_epochs" in str(own.answers["a"])


def test_nobody_reads_another_sites_update_or_takes_its_place(own: Door) -> None:
    body = wire.encode({"student": np.ones(1000, np.float32)})
    announce = dumped(task=own.task(), blob=body.blob.model_dump())
    assert own.send("POST", "/updates", announce, "a")[0] == 200
    assert own.send("PUT", f"/updates/{body.blob.digest}?offset=0&attempt=1", body.content, "a")[0] == 200
    for path in (f"/bodies/{body.blob.digest}?offset=0&size=10", "/student"):
        assert own.send("GET", path, site="b")[0] == 404
    commit = dumped(task=own.task(), digest=body.blob.digest, rows=30)
    assert own.send("POST", "/commit", commit, "b")[0] == 422  # b has sent no such thing
    assert own.send("POST", "/commit", commit, "a", key="b")[0] == 401
    assert "a" not in own.answers
    assert "b" not in own.answers


def test_a_site_joins_by_the_name_that_it_signed(own: Door, tmp_path: Path) -> None:
    own.keys["c"] = Key.make(tmp_path / "c.key")
    made = own.keys["c"].public
    code = own.guests.invite("c", 1.0)
    body = dumped(name="c", public_key=made, proof=identity.proof(code, "c", made))
    status, answer = own.send("POST", "/join", body, "a", key="c")
    assert (status, answer["error"]) == (401, "the name is not the one that was signed")
    assert own.send("POST", "/join", body, "c") == (200, {})


def test_a_removed_site_is_out_at_once_and_no_round_waits_for_it(own: Door) -> None:
    assert own.send("POST", "/ask", b"{}")[0] == 200
    assert own.send("POST", "/ask", b"{}", "b")[0] == 200
    own.guests.remove("a")
    assert own.send("POST", "/ask", b"{}")[0] == 401
    own.threads[0].join(5)
    assert isinstance(own.answers["a"], SiteLostError)
    assert "was removed" in str(own.answers["a"])
    assert set(own.gateway.heard) == {"b"}
    assert own.send("POST", "/ask", b"{}", "b")[0] == 200
    assert "b" not in own.answers


def test_a_site_that_is_removed_while_it_waits_for_work_gets_none(own: Door) -> None:
    own.boxes["a"].cancel(1)
    waiting: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: waiting.append(own.send("POST", "/ask", dumped(wait_s=10))), daemon=True)
    asking.start()
    while "a" not in own.gateway.heard:
        time.sleep(0.001)
    own.guests.remove("a")
    own.ask("a")
    asking.join(5)
    assert [status for status, _ in waiting] == [401]


def test_another_version_is_refused_with_a_line_to_read(own: Door) -> None:
    status, answer = own.send("POST", "/ask", b"{}", after_headers={identity.WIRE_VERSION: "2.0"})
    assert status == 426
    assert "update fedppd" in answer["error"]
    assert own.http.get("/v7/ask").status_code == 426
    assert own.http.get("/hello").json()["wire"] == "1.1"


def test_what_is_no_update_of_this_run_is_refused(own: Door) -> None:
    huge = dumped(task=own.task(), blob={"digest": "0" * 64, "size": 10**9})
    assert own.send("POST", "/updates", huge)[0] == 413
    assert own.send("POST", "/updates", dumped(task=own.task(2), blob={"digest": "0" * 64, "size": 1}))[0] == 409
    pickled = wire.Body(b"\x80\x04N.", wire.Blob(digest=wire.digest_of(b"\x80\x04N."), size=4))
    assert upload(own, pickled)[0] == 422
    doubles = wire.encode({"student": np.ones(3, np.float64)})
    assert upload(own, doubles)[0] == 422
    assert own.send("PUT", "/updates/x?offset=0&attempt=1", bytes(wire.PIECE + 1))[0] == 413


def test_a_silent_site_is_lost_and_an_absent_one_at_once() -> None:
    now = [0.0]
    box = Mailbox("a", "client-00", RUN, {}, 5.0, lambda: now[0])
    now[0] = 5.0
    with pytest.raises(SiteLostError, match="has not joined"):
        box.ask(STATE)
    box.hear(wire.Ask())
    threading.Timer(0.2, lambda: now.__setitem__(0, 11.0)).start()
    with pytest.raises(SiteLostError, match="last heard of 6 s ago"):
        box.ask(STATE)
    box.hear(wire.Ask())
    threading.Timer(0.2, lambda: box.cancel(1)).start()
    with pytest.raises(LocalUpdateCancelled):
        box.ask(STATE)
