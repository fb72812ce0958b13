"""Decoding in other processes: a body that is slow, or deadly, to decode costs its sender an answer, and nobody else.

Two lanes. Bodies that are known to be quick have a decoder of their own, so that they never wait behind slow ones.
The others wait for patient decoders, which run at low priority, the smallest first.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from fedppd_ray.data.parts import RawRows
from serve.decoder_process import FRAME
from serve.inputs import Body
from serve.refusals import RequestError

logger = logging.getLogger("fedppd.serve")

# A large body is handed over in pieces, so that no other request waits for the copy.
_PIECE_BYTES = 256 * 1024
# Beyond its limit of processor time, for a decoder that sleeps or is stopped: by the clock, times this.
_PATIENCE = 10
_START_SECONDS = 60.0


class DecoderEnded(Exception):
    """The process is gone: by its limit of time, by a crash, or because the service closes."""


@dataclass(frozen=True)
class Decoded:
    values: RawRows
    facts: dict[str, Any]


@dataclass(order=True)
class _Job:
    size: int
    number: int
    task: dict[str, Any] = field(compare=False)
    body: Body = field(compare=False)
    answer: "asyncio.Future[Decoded]" = field(compare=False)


class Nursery:
    """The parent side of `decoder_process.nurse`: makes decoders within milliseconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False

    def fork(self, patient: bool) -> tuple[int, socket.socket]:
        """A new decoder's process id and our end of its socket. Blocks, the first time for the imports."""
        with self._lock:
            for attempt in (1, 2):
                if self._closed:
                    raise DecoderEnded("the service is closing")
                try:
                    return self._ask(patient)
                except OSError as error:
                    logger.error("the decoders' nursery is gone (%s); attempt %d to start another", error, attempt)
                    self._stop()
            raise DecoderEnded("no decoder could be started")

    def _ask(self, patient: bool) -> tuple[int, socket.socket]:
        control = self._control or self._start()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"p" if patient else b"q"], [theirs.fileno()])
        answer = control.recv(8)
        if len(answer) != 8:
            ours.close()
            raise OSError("no answer")
        ours.setblocking(False)
        return struct.unpack("<q", answer)[0], ours

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_SECONDS)
        # The same modules as here, one thread each, and no look into the current folder for them.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        command = [sys.executable, "-P", "-m", "serve.decoder_process"]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        return self._control

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # before the lock: a fork that waits for it ends now
        with self._lock:
            self._stop()


class _Channel(asyncio.BufferedProtocol):
    """One conversation at a time with a decoder. Answers are received straight into their own buffer."""

    def __init__(self) -> None:
        self._writable = asyncio.Event()
        self._writable.set()
        self._answer: asyncio.Future[tuple[dict[str, Any], bytearray]] | None = None
        self._expect(bytearray(FRAME.size))
        self._about = self._content = bytearray()
        self._closed = False

    async def ask(self, task: dict[str, Any], body: Body) -> tuple[dict[str, Any], bytearray]:
        if self._closed:
            raise DecoderEnded
        self._answer = asyncio.get_running_loop().create_future()
        text = json.dumps(task).encode()
        self._transport.write(FRAME.pack(len(text), len(body)) + text)
        view = memoryview(body)
        for start in range(0, len(body), _PIECE_BYTES):
            await self._writable.wait()
            self._transport.write(view[start : start + _PIECE_BYTES])
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self._closed = True
        self._writable.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(DecoderEnded())

    def _expect(self, buffer: bytearray) -> None:
        self._buffer, self._filled = buffer, 0

    def get_buffer(self, _hint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, received: int) -> None:
        self._filled += received
        if self._filled < len(self._buffer):
            return
        if self._buffer is self._content:
            self._finish()
        elif self._buffer is self._about:
            if self._content:
                self._expect(self._content)
            else:
                self._finish()
        else:
            about, content = FRAME.unpack(self._buffer)
            self._about, self._content = bytearray(about), bytearray(content)
            self._expect(self._about)

    def _finish(self) -> None:
        answer, self._answer = self._answer, None
        about, content = self._about, self._content
        self._about = self._content = bytearray()
        self._expect(bytearray(FRAME.size))
        if answer is not None and not answer.done():
            answer.set_result((json.loads(about), content))

    def close(self) -> None:
        self._transport.abort()


class _Lane:
    """A queue, and the decoders that take from it."""

    def __init__(self, nursery: Nursery, patient: bool, decoders: int, on_loss: Callable[[], None]) -> None:
        self._nursery, self._patient, self._on_loss = nursery, patient, on_loss
        self._waiting: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._workers = [asyncio.ensure_future(self._work()) for _ in range(decoders)]

    def put(self, job: _Job) -> None:
        self._waiting.put_nowait(job)

    async def _work(self) -> None:
        channel: _Channel | None = None
        job: _Job | None = None
        try:
            while True:
                if channel is None:
                    pid, channel = await self._new()
                job = await self._waiting.get()
                if job.answer.done():  # its caller has left
                    continue
                try:
                    await self._do(job, channel)
                except (DecoderEnded, TimeoutError) as error:
                    if isinstance(error, TimeoutError):  # it is still there
                        os.kill(pid, signal.SIGKILL)
                    channel.close()
                    channel = None
                    self._on_loss()
                    _settle(job, _too_slow(job.task["seconds"]))
        except DecoderEnded as error:
            logger.error("decoding has ended: %s", error)
        finally:
            if channel is not None:
                channel.close()
            if job is not None:
                job.answer.cancel()
            while not self._waiting.empty():
                self._waiting.get_nowait().answer.cancel()

    async def _new(self) -> tuple[int, _Channel]:
        loop = asyncio.get_running_loop()
        pid, ours = await loop.run_in_executor(None, self._nursery.fork, self._patient)
        _, channel = await loop.create_connection(_Channel, sock=ours)
        return pid, channel

    async def _do(self, job: _Job, channel: _Channel) -> None:
        async with asyncio.timeout(_PATIENCE * job.task["seconds"]):
            facts, content = await channel.ask(job.task, job.body)
        if "refusal" in facts:
            _settle(job, RequestError(*facts["refusal"]))
        elif "fault" in facts:
            _settle(job, RuntimeError(f"in a decoder: {facts['fault']}"))
        elif not job.answer.done():
            values = np.frombuffer(content, facts["dtype"]).reshape(facts["shape"])
            job.answer.set_result(Decoded(values, facts))

    def close(self) -> None:
        for worker in self._workers:
            worker.cancel()


def _settle(job: _Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


def _too_slow(seconds: float) -> RequestError:
    return RequestError(
        422,
        "too_slow_to_decode",
        "body",
        f"decoding it took more than {seconds:g} s of processor time, or broke the decoder; send less, or save it anew",
    )


class Decoders:
    """Lives on one event loop, from `start` to `close`."""

    def __init__(self, seconds: float, patient: int, on_loss: Callable[[], None]) -> None:
        self._seconds, self._patient, self._on_loss = seconds, patient, on_loss
        self._nursery = Nursery()
        self._lanes: tuple[_Lane, _Lane] | None = None
        self._numbers = count()

    def start(self) -> None:
        """Returns at once; the processes are ready some tenths of a second later."""
        quick, slow = (
            _Lane(self._nursery, patient, decoders, self._on_loss)
            for patient, decoders in ((False, 1), (True, self._patient))
        )
        self._lanes = (quick, slow)

    async def decode(self, task: dict[str, Any], body: Body, quick: bool) -> Decoded:
        if self._lanes is None:
            self.start()
        assert self._lanes is not None
        answer: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()
        task = task | {"seconds": self._seconds}
        self._lanes[0 if quick else 1].put(_Job(len(body), next(self._numbers), task, body, answer))
        return await answer

    async def close(self) -> None:
        for lane in self._lanes or ():
            lane.close()
        await asyncio.get_running_loop().run_in_executor(None, self._nursery.close)
