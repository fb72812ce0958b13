"""Threads that give way to the event loop."""

import os
import sys
import threading

_NICENESS = 10


def lower_priority() -> None:
    """For long work beside the event loop, where cores are few. Linux counts niceness by thread; others do not."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
