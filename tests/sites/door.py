"""A gateway in this process with two sites that are waited for, and requests to it that can be bent."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient

from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runs.signature import Key, verified
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.gateway import Gateway
from fedppd_ray.sites.guests import Guests
from fedppd_ray.sites.mailbox import Mailbox

STATE = GlobalState(0, {"student": np.arange(1000, dtype=np.float32)})
RUN = "ab" * 16


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Door:
    """A gateway with two sites; each waits for an update of round 1."""

    def __init__(self, folder: Path) -> None:
        self.guests = Guests(folder / "guests")
        self.keys = {name: Key.make(folder / f"{name}.key") for name in ("a", "b", "stranger")}
        for name in ("a", "b"):
            public = self.keys[name].public
            code = self.guests.invite(name, 1.0)
            assert self.guests.join(name, public, identity.proof(code, name, public)) is None
        self.boxes = {name: Mailbox(name, f"client-{name}", RUN, {"name": "x"}, 600.0) for name in ("a", "b")}
        self.gateway = Gateway(self.guests, self.boxes)
        self.http = TestClient(self.gateway.app, raise_server_exceptions=False)
        self.answers: dict[str, Any] = {}
        self.threads = []
        for name in ("a", "b"):
            self.boxes[name].hear(wire.Ask())
            self.ask(name)

    def ask(self, name: str) -> None:
        def wait() -> None:
            try:
                self.answers[name] = self.boxes[name].ask(STATE)
            except Exception as error:
                self.answers[name] = error

        self.threads.append(threading.Thread(target=wait, daemon=True))
        self.threads[-1].start()
        while self.boxes[name].offer(0.0) is None:
            time.sleep(0.001)

    def close(self) -> None:
        for box in self.boxes.values():
            box.cancel(99)

    def send(
        self, method: str, path: str, body: bytes = b"", site: str = "a", key: str | None = None, **change: Any
    ) -> tuple[int, dict[str, Any]]:
        """`change`: of what is signed; `after_*`: of what is sent instead."""
        signed = {"method": method, "path": wire.PREFIX + path, "body": body, "site": site}
        signed |= {"time": f"{time.time():.3f}", "nonce": identity.new_nonce(), "run": RUN, "round": "1"}
        signed |= {name: value for name, value in change.items() if name in signed}
        request = identity.Request(**signed)
        audience = change.get("audience", self.guests.key().public)
        headers = identity.signed_headers(self.keys[key or site], request, audience)
        headers |= {identity.WIRE_VERSION: "1.0", **change.get("after_headers", {})}
        answer = self.http.request(
            change.get("after_method", method),
            wire.PREFIX + change.get("after_path", path),
            content=change.get("after_body", body),
            headers=headers,
        )
        nonce = headers.get(identity.NONCE, "")
        if re.fullmatch("[0-9a-f]{32}", nonce):
            text = identity.answer_text(nonce, answer.status_code, answer.content)
            assert verified(self.guests.key().public, text, answer.headers.get(identity.SIGNATURE, "")), answer
        kind = answer.headers["content-type"]
        return answer.status_code, answer.json() if kind == "application/json" else {"bytes": answer.content}

    def task(self, attempt: int = 1) -> dict[str, Any]:
        return {"run": RUN, "round": 1, "attempt": attempt}

    def state(self) -> Any:
        """All that a request could change."""
        files = {str(path): path.read_bytes() for path in self.guests.folder.rglob("*") if path.is_file()}
        boxes = [
            (box._open and (box._open.task, box._open.answer), box._accepted, box._presence)
            for box in self.boxes.values()
        ]
        return files, boxes, dict(self.answers), set(self.gateway.heard), set(self.gateway.gone)


def dumped(**values: Any) -> bytes:
    return json.dumps(values).encode()
