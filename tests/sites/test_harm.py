"""The door against requests that are malformed, altered, replayed, stale, foreign: 4xx, and nothing has changed."""

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedppd_ray.sites import identity
from tests.sites.door import RUN, Door, dumped

MESSAGES = ["/ask", "/beat", "/updates", "/commit", "/fail", "/bye", "/join"]
HARM = st.sampled_from(
    [
        "signature", "body", "path", "method", "time", "key", "stranger", "audience", "headers", "malformed", "run",
        "replay", "fields", "piece", "fetch",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HEADERS = [identity.SITE, identity.TIME, identity.NONCE, identity.RUN, identity.ROUND, identity.SIGNATURE]
TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=70)
COUNT = st.integers(-1, 3).map(str)


def harmful(door: Door, path: str, harm: str, data: st.DataObject) -> tuple[int, dict[str, Any]]:
    good = {
        "/ask": b'{"rows": 5}',
        "/beat": dumped(task=door.task()),
        "/updates": dumped(task=door.task(), blob={"digest": "0" * 64, "size": 9}),
        "/commit": dumped(task=door.task(), digest="0" * 64, rows=5),
        "/fail": dumped(task=door.task(), reason="no"),
        "/bye": b"{}",
        "/join": dumped(name="a", public_key="0" * 64, proof="0" * 64),
    }[path]
    if harm == "signature":
        return door.send("POST", path, good, after_headers={identity.SIGNATURE: data.draw(TEXT)})
    if harm == "body":
        return door.send("POST", path, good, after_body=good + data.draw(st.binary(min_size=1, max_size=9)))
    if harm == "path":
        other = data.draw(st.sampled_from([p for p in [*MESSAGES, "/x", "/ask/", "/ask?x=1"] if p != path]))
        return door.send("POST", path, good, after_path=other)
    if harm == "method":
        return door.send("POST", path, good, after_method=data.draw(st.sampled_from(["GET", "PUT", "DELETE", "PATCH"])))
    if harm == "time":
        # Far from what is fresh: on a busy machine seconds may pass between signing and reading. Edges: test_identity.
        off = data.draw(st.sampled_from([-1e9, -1000.0, 1000.0, 1e12, float("nan"), float("inf")]))
        return door.send("POST", path, good, time=str(time.time() + off))
    if harm == "key":
        return door.send("POST", path, good, "a", key=data.draw(st.sampled_from(["b", "stranger"])))
    if harm == "stranger":
        return door.send("POST", path, good, "stranger")
    if harm == "audience":
        return door.send("POST", path, good, audience="0" * 64)
    if harm == "headers":
        header, text = data.draw(st.sampled_from(HEADERS)), data.draw(TEXT)
        assume(text not in ("a", "1", RUN))  # as it was signed: a good request
        return door.send("POST", path, good, after_headers={header: text})
    if harm == "run":
        return door.send("POST", path if path in ("/beat", "/commit", "/fail") else "/beat",
                         dumped(task=door.task(), digest="0" * 64, rows=5, reason="no"), run="cd" * 16)  # fmt: skip
    if harm == "replay":
        nonce = identity.new_nonce()
        assert door.send("POST", "/beat", dumped(task=door.task()), nonce=nonce)[0] == 200
        return door.send("POST", "/beat", dumped(task=door.task()), nonce=nonce)
    if harm in ("piece", "fetch"):  # of something that was not announced, or not offered
        what = quote(data.draw(TEXT | st.just("0" * 64)), safe="")
        numbers = "&".join(
            f"{name}={quote(data.draw(TEXT | COUNT), safe='')}" for name in ("offset", "size", "attempt")
        )
        if harm == "fetch":
            return door.send("GET", f"/bodies/{what}?{numbers}")
        return door.send("PUT", f"/updates/{what}?{numbers}", data.draw(st.binary(max_size=50)))
    if harm == "malformed":  # signed by a site that knows what it does
        path = path if path not in ("/ask", "/bye") else "/commit"
        return door.send("POST", path, data.draw(st.binary(max_size=50)))
    path = path if path not in ("/ask", "/bye") else "/updates"
    values = {**json.loads(good), data.draw(st.sampled_from(["task", "digest", "blob"])): data.draw(JSON)}
    values = {"digest": 3, **values} if path == "/beat" else values
    if path in ("/beat", "/fail", "/join"):
        values["task" if path != "/join" else "proof"] = data.draw(JSON)
    if path == "/commit":
        values["digest"] = data.draw(JSON)
    if path == "/updates":
        values["blob"] = data.draw(JSON)
    return door.send("POST", path, json.dumps(values).encode())


class Doors:
    """A door in the state in which it was made, whatever an example before has done: each stands for itself."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory, self._made = factory, list[Door]()

    def fresh(self) -> Door:
        if not self._made or self._made[-1].state() != self._before:
            self._made.append(Door(self._factory.mktemp("door")))
            self._before = self._made[-1].state()
        return self._made[-1]

    def close(self) -> None:
        for door in self._made:
            door.close()


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    made = Doors(tmp_path_factory)
    yield made
    made.close()


def check_that_nothing_changes(doors: Doors, path: str, harm: str, data: st.DataObject) -> None:
    door = doors.fresh()
    before = door.state()
    status, answer = harmful(door, path, harm, data)
    assert 400 <= status < 500, (status, answer)
    assert answer["error"]
    assert door.state() == before


CALM = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "derandomize": True}


@settings(max_examples=300, **CALM)
@given(path=st.sampled_from(MESSAGES), harm=HARM, data=st.data())
def test_bad_requests_change_nothing(doors: Doors, path: str, harm: str, data: st.DataObject) -> None:
    check_that_nothing_changes(doors, path, harm, data)


@pytest.mark.long
@settings(max_examples=3000, **CALM)
@given(path=st.sampled_from(MESSAGES), harm=HARM, data=st.data())
def test_three_thousand_bad_requests_change_nothing(doors: Doors, path: str, harm: str, data: st.DataObject) -> None:
    check_that_nothing_changes(doors, path, harm, data)
