"""The .npy format, strictly: numpy's own reader evaluates the header as Python, which crafted headers exploit."""

import math
import re
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.refusals import RequestError, invalid, malformed

_MAGIC = b"\x93NUMPY"
# Length of the header's length: two bytes in version 1.0, four in 2.0.
_LENGTHS = {b"\x01\x00": "<H", b"\x02\x00": "<I"}
_MOST_HEADER_BYTES = 4096
_ITEM = rb"\s*['\"](descr|fortran_order|shape)['\"]\s*:\s*('[^'\\]*'|\"[^\"\\]*\"|\[[^]]*\]|True|False|\([0-9, ]*\))\s*"
_HEADER = re.compile(rb"\{" + _ITEM + b"," + _ITEM + b"," + _ITEM + rb",?\s*\}\s*")
_TYPES = re.compile(rb"['\"][<>|=]?(u1|u2|f2|f4|f8)['\"]")
# More digits than a machine word holds are no size.
_SHAPE = re.compile(rb"\(\s*(?:[0-9]{1,18}\s*(?:,\s*|(?=\))))*\)")


def read_npy(body: bytes | bytearray) -> NDArray[Any]:
    """The array as a view of the body. Takes uint8, uint16 and floats; never unpickles, copies nothing."""
    header, start = _header(body)
    found = _TYPES.fullmatch(header[b"descr"])
    if found is None:
        given = header[b"descr"][:40].decode("ascii", "replace")
        raise invalid("body", f"the array's type is {given}; give uint8, uint16 or float")
    dtype = np.dtype(found[0][1:-1].decode())
    if header[b"fortran_order"] not in (b"True", b"False") or not _SHAPE.fullmatch(header[b"shape"]):
        raise _unreadable("fortran_order or shape is not what numpy writes")
    shape = tuple(int(side) for side in re.findall(rb"[0-9]+", header[b"shape"]))
    # Exact integers: a header may claim more elements than a machine word can count.
    if math.prod(shape) * dtype.itemsize != len(body) - start:
        raise malformed("body", f"the .npy header promises {math.prod(shape)} values, which the body does not hold")
    flat: NDArray[Any] = np.frombuffer(body, dtype, offset=start)
    return flat.reshape(shape, order="F" if header[b"fortran_order"] == b"True" else "C")


def _header(body: bytes | bytearray) -> tuple[dict[bytes, bytes], int]:
    if not body.startswith(_MAGIC):
        raise _unreadable("it does not begin as one")
    form = _LENGTHS.get(bytes(body[6:8]))
    if form is None:
        raise _unreadable("only versions 1.0 and 2.0 are known")
    start = 8 + struct.calcsize(form)
    if len(body) < start:
        raise _unreadable("the header is cut short")
    (length,) = struct.unpack_from(form, body, 8)
    if length > min(_MOST_HEADER_BYTES, len(body) - start):
        raise _unreadable("the header is cut short, or too long")
    match = _HEADER.fullmatch(bytes(body[start : start + length]))
    if match is None or len({match[1], match[3], match[5]}) != 3:
        raise _unreadable("the header is not what numpy writes")
    return {match[1]: match[2], match[3]: match[4], match[5]: match[6]}, start + length


def _unreadable(reason: str) -> RequestError:
    return malformed("body", f"is not a readable .npy file: {reason}")
