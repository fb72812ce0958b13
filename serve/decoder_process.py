"""The processes in which bodies are decoded: a nursery that forks decoders, and what a decoder does.

The nursery imports the libraries once and never reads a request, so that a decoder that had to be ended is replaced
within milliseconds. Decoders have a limit of processor time for each body, which the kernel enforces, whatever code
runs. Both end when the other side of their socket does.
"""

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedppd_ray.data.pixels import hint_for
from serve.column_tensors import read_columns
from serve.grpc_tensors import GRPC, rest_form
from serve.inputs import CSV, IMAGES, JSON, checked_pixels, decode_image, decode_json
from serve.refusals import RequestError
from serve.rows import decode_csv, decode_records, encoded
from serve.schemas import Validator, input_validator
from serve.takes import ImageInput, TableInput, taken
from serve.tensors import json_length, read_tensors

TENSORS = "open inference"
# Of a request and of an answer alike: bytes of the JSON part, bytes of what follows it.
FRAME = struct.Struct("<II")
# What a decoder may hold on top of its libraries. The largest image (25 megapixels, four channels, a few copies) fits.
_MEMORY_BYTES = 2**30
_NICENESS = 15

Answer = tuple[dict[str, Any], NDArray[Any]]


def decode(task: dict[str, Any], body: bytearray) -> Answer:
    if task["kind"] == GRPC:
        content, header = rest_form(body, *task["model"])
        return decode(task | {"kind": TENSORS, "header": header}, bytearray(content))
    takes, kind, most = taken(task["takes"]), task["kind"], task["max_images"]
    if isinstance(takes, TableInput):
        return _decode_rows(task, body, takes)
    if kind in IMAGES:
        return {}, decode_image(body, kind, takes, task["max_pixels"])
    if kind == JSON:
        pixels, asked = decode_json(body, _validator(takes, most))
        return {"asked": asked, "hint": hint_for(pixels, takes.range)}, pixels
    if kind == TENSORS:
        wish, array = read_tensors(body, json_length(body, task["header"]), takes, most)
        pixels = checked_pixels("inputs[0].data", array, takes)
        return {"wish": asdict(wish), "hint": hint_for(pixels, takes.range)}, pixels
    raise ValueError(f"no decoder for {kind}")


def _decode_rows(task: dict[str, Any], body: bytearray, takes: TableInput) -> Answer:
    kind, most = task["kind"], task["max_images"]
    if kind == JSON:
        rows, odd, asked = decode_records(body, takes, most)
        return {"asked": asked, "outside": odd}, rows
    if kind == CSV:
        rows, odd = decode_csv(body, takes, most)
        return {"outside": odd}, rows
    if kind == TENSORS:
        wish, columns = read_columns(body, json_length(body, task["header"]), takes, most)
        rows, odd = encoded("inputs", columns, takes)
        return {"wish": asdict(wish), "outside": odd}, rows
    raise ValueError(f"no decoder for {kind}")


@functools.lru_cache(maxsize=8)
def _validator(takes: ImageInput, max_images: int) -> Validator:
    return input_validator(takes, max_images)


def serve_tasks(channel: socket.socket) -> None:
    """Answer one task after the other until the channel closes."""
    while head := _receive(channel, FRAME.size):
        about, length = FRAME.unpack(head)
        task = json.loads(_receive(channel, about))
        body = _receive(channel, length)
        # Processor time, not time of day: on a busy machine an honest image may wait.
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])
        facts, payload = _answer(task, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        text = json.dumps(facts).encode()
        channel.sendall(FRAME.pack(len(text), payload.nbytes) + text)
        channel.sendall(payload.data)
        del body, payload


def _answer(task: dict[str, Any], body: bytearray) -> Answer:
    nothing = np.empty(0, np.uint8)
    try:
        facts, pixels = decode(task, body)
    except RequestError as error:
        return {"refusal": [error.status, error.code, error.field, error.message]}, nothing
    except MemoryError:
        return {"refusal": [413, "image_too_large", "body", "takes too much memory to decode"]}, nothing
    except Exception as error:  # a fault of ours: the service logs it and answers 500, and this process goes on
        return {"fault": f"{type(error).__name__}: {error}"}, nothing
    payload = np.ascontiguousarray(pixels)
    return facts | {"shape": payload.shape, "dtype": payload.dtype.str}, payload.reshape(-1)


def _receive(channel: socket.socket, count: int) -> bytearray:
    """Exactly so many bytes; none where the channel has closed."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        received = channel.recv_into(view)
        if not received:
            return bytearray()
        view = view[received:]
    return content


def _become_decoder(channel: socket.socket, patient: bool) -> None:
    # Python would only note the signal and act on it after the C code that it interrupts; the kernel does not wait.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if patient:
        os.nice(_NICENESS)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES,) * 2)
    serve_tasks(channel)


def nurse(control: socket.socket) -> None:
    """For every socket that arrives, a decoder; answers with its process id. One byte says whether it is patient."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            control.close()
            _run(_become_decoder, socket.socket(fileno=descriptors[0]), message == b"p")
        os.close(descriptors[0])
        control.sendall(struct.pack("<q", child))


def _run(work: Callable[..., None], *arguments: Any) -> None:
    """In a forked child: never return into the parent's code, whatever happens."""
    code = 1
    try:
        work(*arguments)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    # Ctrl-C goes to every process of a terminal; these end when the service closes their sockets.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody waits for the decoders: the kernel forgets them as they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    Image.preinit()
    nurse(socket.socket(fileno=0))


if __name__ == "__main__":
    main()
