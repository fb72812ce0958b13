"""What becomes of freed memory between two training steps.

A step frees megabytes of activations and asks for as many again in the next. glibc gives such blocks back to the
kernel, which zeroes and maps the same pages anew: several hundred page faults a step, a tenth of an MNIST epoch where
it was measured. It stops by itself once a block of 32 MiB has come and gone; a small data set never has one.
"""

import ctypes
import functools

# From <malloc.h>, and the values that glibc itself would arrive at.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 * 2**20
_TRIM_BYTES = 2 * _MMAP_BYTES


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 64 MiB of freed memory for its next step. False where it has no glibc."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
