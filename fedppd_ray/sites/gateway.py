"""The coordinator's door: an HTTPS application that lets signed requests through to mailboxes. Knows no mathematics.

Every request but `hello` is signed by a pinned key (`identity`), and every answer by the coordinator's. A site reaches
its own mailbox and its own upload only: its name comes from the verified signature, never from a path.
"""

import asyncio
import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from fedppd_ray.runs.layout import CARD, SIGNATURE, STUDENT, WEIGHTS
from fedppd_ray.sites import identity, wire
from fedppd_ray.sites.call import Call, Refusal, Reply, read_body
from fedppd_ray.sites.guests import INCOMING, Guests
from fedppd_ray.sites.incoming import Incoming
from fedppd_ray.sites.mailbox import Box, BoxAway

log = logging.getLogger(__name__)
_BODY_S = 120.0  # for one body to arrive, whatever the line
_LOOK_S = 1.0  # between two looks at whether waiting for work still makes sense
_THREADS = 256  # questions that wait at once
_NONCE = re.compile(r"[0-9a-f]{32}")
_TASK_HEADERS = re.compile(r"[0-9a-f]{32}|-"), re.compile(r"[0-9]{1,9}|-")
_MOST_TIMES, _MOST_PLUS = 4, 16 * 2**20  # an update is at most so many times what the site was sent, and so much more


class Gateway:
    def __init__(self, guests: Guests, boxes: Mapping[str, Box], export: Path | None = None) -> None:
        """`boxes`: site → its mailbox; `export`: the run folder whose student sites may fetch."""
        self._guests = guests
        self._key = guests.key()
        self._boxes = boxes
        self._export = export
        self._door = identity.Doorkeeper(self._key.public, guests.keys)
        self._incoming = Incoming(guests.folder / INCOMING)
        self._bodies = _Bodies()
        self._offered: dict[str, wire.Offer] = {}
        self.heard: dict[str, float] = {}  # site that has asked for work → when it was last heard of, monotonic
        self.finished = threading.Event()
        self.gone: set[str] = set()  # who knows that the run is over, and has what it wants
        self._limiter: CapacityLimiter | None = None
        self.app = self._application()

    def _application(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        message, piece = wire.MESSAGE, wire.PIECE
        routes: list[tuple[str, str, Callable[[Call], Reply], int]] = [
            ("POST", "/ask", self._ask, message),
            ("POST", "/beat", self._beat, message),
            ("GET", "/bodies/{digest}", self._body, message),
            ("POST", "/updates", self._announce, message),
            ("PUT", "/updates/{digest}", self._piece, piece),
            ("POST", "/commit", self._commit, message),
            ("POST", "/answers", self._tell, message),
            ("POST", "/fail", self._fail, message),
            ("GET", "/student", self._student, message),
            ("POST", "/bye", self._bye, message),
        ]
        for method, path, handler, limit in routes:
            app.add_api_route(wire.PREFIX + path, self._signed(handler, limit), methods=[method], response_model=None)
        app.add_api_route(f"{wire.PREFIX}/join", self._joining, methods=["POST"], response_model=None)
        app.add_api_route("/hello", self._hello, methods=["GET"], response_model=None)
        for status in (404, 405):
            app.add_exception_handler(status, self._nowhere)
        return app

    # ---- the door

    def _signed(self, handler: Callable[[Call], Reply], limit: int) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            def work(body: bytes) -> Reply:
                return handler(self._let_in(request, body))

            return await self._answer(request, limit, work)

        return endpoint

    async def _joining(self, request: Request) -> Response:
        return await self._answer(request, wire.MESSAGE, lambda body: self._join(request, body))

    async def _answer(self, request: Request, limit: int, work: Callable[[bytes], Reply]) -> Response:
        """Read, do, sign. Handlers run in threads: they wait for mailboxes and disks."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(_THREADS)
        try:
            async with asyncio.timeout(_BODY_S):
                body = await read_body(request, limit)
            reply, status = await to_thread.run_sync(work, body, limiter=self._limiter), 200
        except Refusal as refusal:
            reply, status = wire.Trouble(error=str(refusal), time=time.time()), refusal.status
        except BoxAway as error:  # its process is being replaced; the site tries again
            reply, status = wire.Trouble(error=str(error)), 503
        except (ClientDisconnect, TimeoutError):
            reply, status = wire.Trouble(error="the body did not arrive"), 408
        content = reply if isinstance(reply, bytes) else reply.model_dump_json().encode()
        return self._sign(request, content, status, "application/octet-stream" if isinstance(reply, bytes) else None)

    def _sign(self, request: Request, content: bytes, status: int, kind: str | None = None) -> Response:
        nonce = request.headers.get(identity.NONCE, "")
        headers = {identity.WIRE_VERSION: wire.version_text()}
        if _NONCE.fullmatch(nonce):
            headers[identity.SIGNATURE] = self._key.sign(identity.answer_text(nonce, status, content))
        return Response(content, status, headers, media_type=kind or "application/json")

    async def _nowhere(self, request: Request, error: Any) -> Response:
        wanted = wire.version_refusal(request.url.path.split("/")[1].removeprefix("v") + ".0")
        text = wanted if re.match(r"/v\d+/", request.url.path) and wanted else "no such thing here"
        status = 426 if text == wanted else int(error.status_code)
        return self._sign(request, wire.Trouble(error=text).model_dump_json().encode(), status)

    async def _hello(self, request: Request) -> Response:
        hello = wire.Hello(wire=wire.version_text(), coordinator=self._key.public)
        return self._sign(request, hello.model_dump_json().encode(), 200)

    def _request(self, request: Request, body: bytes) -> identity.Request:
        head = request.headers
        path = request.scope["raw_path"].decode("latin-1")
        if request.scope["query_string"]:
            path += "?" + request.scope["query_string"].decode("latin-1")
        run, round_id = head.get(identity.RUN, ""), head.get(identity.ROUND, "")
        if why := wire.version_refusal(head.get(identity.WIRE_VERSION, "")):
            raise Refusal(426, why)
        if not (_TASK_HEADERS[0].fullmatch(run) and _TASK_HEADERS[1].fullmatch(round_id)):
            raise Refusal(401, "run and round must be signed")
        if not _NONCE.fullmatch(head.get(identity.NONCE, "")):
            raise Refusal(401, "no nonce")
        return identity.Request(
            request.method, path, body, head.get(identity.SITE, ""), head.get(identity.TIME, ""),
            head.get(identity.NONCE, ""), run, round_id,
        )  # fmt: skip

    def _let_in(self, request: Request, body: bytes) -> Call:
        self._put_out()
        asked = self._request(request, body)
        if why := self._door.refusal(asked, request.headers.get(identity.SIGNATURE, "")):
            log.warning("refused %s %s from %.40r: %s", asked.method, request.url.path[:80], asked.site, why)
            raise Refusal(401, why)
        if asked.site in self.heard:
            self.heard[asked.site] = time.monotonic()
        return Call(asked.site, body, dict(request.query_params), request.path_params, asked.run, asked.round)

    def _put_out(self) -> None:
        """Whoever was removed since the last request: rounds do not wait for them."""
        for site in (self._boxes.keys() & self.heard.keys()) - self._guests.sites().keys():
            with contextlib.suppress(BoxAway):  # then with the next request
                self._boxes[site].put_out()
                log.warning("%s was removed", site)
                self.heard.pop(site, None)

    def _join(self, request: Request, body: bytes) -> Reply:
        asked = self._request(request, body)
        join = Call(asked.site, body, {}, {}, asked.run, asked.round).message(wire.Join)
        why = "the name is not the one that was signed" if join.name != asked.site else None
        why = why or self._door.refusal(asked, request.headers.get(identity.SIGNATURE, ""), join.public_key)
        why = why or self._guests.join(join.name, join.public_key, join.proof)
        if why:
            log.warning("refused that %.63s joins: %s", join.name, why)
            raise Refusal(401, why)
        log.info("%s has joined, with key %s", join.name, join.public_key)
        return wire.Nothing()

    # ---- what a site may do

    def _box(self, call: Call) -> Box:
        box = self._boxes.get(call.site)
        if box is None:
            raise Refusal(403, f"{call.site} is no client of the run that is on")
        return box

    def _ask(self, call: Call) -> Reply:
        ask = call.message(wire.Ask)
        if self.finished.is_set():
            return wire.Answer(finished=True)
        box = self._box(call)
        box.hear(ask)
        self.heard[call.site] = time.monotonic()
        offer = self._offer(box, call.site, ask.wait_s)
        if offer is None:
            return wire.Answer(finished=self.finished.is_set())
        self._offered[call.site] = offer
        return wire.Answer(offer=offer)

    def _offer(self, box: Box, site: str, wait_s: float) -> wire.Offer | None:
        """Work, if there is some in time; no later than the end of the run is noticed, or that the site was removed."""
        until = time.monotonic() + wait_s
        while True:
            offer = box.offer(max(0.0, min(_LOOK_S, until - time.monotonic())))
            if site not in self._guests.sites():
                raise Refusal(401, "no site of this name")
            if offer is not None or self.finished.is_set() or time.monotonic() >= until:
                return offer

    def _beat(self, call: Call) -> Reply:
        return wire.Wanted(wanted=self._box(call).wanted(call.message(wire.Beat).task))

    def _body(self, call: Call) -> Reply:
        digest, offset, size = call.path["digest"], call.number("offset"), min(call.number("size"), wire.PIECE)
        offer = self._offered.get(call.site)
        if offer is not None and offer.state.digest == digest and self._box(call).wanted(offer.task):
            content = self._bodies.get(digest, lambda: self._box(call).body(digest))
        else:
            content = self._bodies.get(digest, lambda: self._exported(digest)) if self._is_student(digest) else None
        if content is None:
            raise Refusal(404, "nobody has offered this")
        return content[offset : offset + size]

    def _announce(self, call: Call) -> Reply:
        announced = call.message(wire.Announce)
        offer = self._box(call).offer(0.0)
        if offer is None or offer.task != announced.task:
            raise Refusal(409, "nobody waits for this update")
        most = _MOST_TIMES * offer.state.size + _MOST_PLUS
        if announced.blob.size > most:
            raise Refusal(413, f"an update of {announced.blob.size} bytes; this run takes {most}")
        return wire.Have(have=self._incoming.have(call.site, announced.blob))

    def _piece(self, call: Call) -> Reply:
        if not self._box(call).wanted(call.task()):
            raise Refusal(409, "nobody waits for this update")
        if not re.fullmatch(r"[0-9a-f]{64}", call.path["digest"]):
            raise Refusal(404, "no such update")
        have = self._incoming.append(call.site, call.path["digest"], call.number("offset"), call.body)
        if have is None:
            raise Refusal(409, "this update was not announced")
        return wire.Have(have=have)

    def _commit(self, call: Call) -> Reply:
        commit, box = call.message(wire.Commit), self._box(call)
        if box.accepted(commit):
            return wire.Done(state="repeated")
        if not box.wanted(commit.task):
            raise Refusal(409, "nobody waits for this update")
        try:
            models = wire.decode(self._incoming.take(call.site, commit.digest))
        except wire.WireError as error:
            raise Refusal(422, str(error)) from None
        if not box.deliver(commit, models):
            raise Refusal(409, "nobody waits for this update")
        self._incoming.drop(call.site)
        return wire.Done(state="accepted")

    def _tell(self, call: Call) -> Reply:
        told = call.message(wire.Told)
        try:
            return wire.Wanted(wanted=self._box(call).tell(told.task, told.arrays()))
        except wire.WireError as error:
            raise Refusal(422, str(error)) from None

    def _fail(self, call: Call) -> Reply:
        fail = call.message(wire.Fail)
        return wire.Wanted(wanted=self._box(call).fail(fail.task, fail.reason, fail.refused))

    def _bye(self, call: Call) -> Reply:
        call.message(wire.Nothing)
        self.gone.add(call.site)
        return wire.Nothing()

    # ---- the student

    def _student(self, _call: Call) -> Reply:
        try:
            folder = (self._export or Path("")) / STUDENT
            card, signature = (folder / CARD).read_text(), (folder / SIGNATURE).read_text()
            weights = wire.Blob(digest=json.loads(card)["sha256"], size=(folder / WEIGHTS).stat().st_size)
        except (OSError, ValueError, KeyError):
            raise Refusal(404, "no signed student has been exported yet") from None
        return wire.Card(card=card, signature=signature, weights=weights)

    def _is_student(self, digest: str) -> bool:
        try:
            return self._export is not None and digest in (self._export / STUDENT / CARD).read_text()
        except OSError:
            return False

    def _exported(self, digest: str) -> bytes | None:
        try:
            content = ((self._export or Path("")) / STUDENT / WEIGHTS).read_bytes()
        except OSError:
            return None
        return content if wire.digest_of(content) == digest else None


class _Bodies:
    """The last two bodies that were asked for: all sites fetch the same weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, bytes] = {}

    def get(self, digest: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        with self._lock:
            if digest not in self._kept:
                content = fetch()
                if content is None:
                    return None
                self._kept = {**dict(list(self._kept.items())[-1:]), digest: content}
            return self._kept[digest]
