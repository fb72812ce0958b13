"""Freed memory stays with the process between two steps."""

import ctypes
import platform
import resource
import subprocess
import sys

import pytest

from fedppd_ray.models.allocator import keep_freed_memory

_FAULTS_OF_STEPS = """
import ctypes, resource, sys, torch
from fedppd_ray.models.allocator import keep_freed_memory
torch.set_num_threads(1)
# glibc's first threshold, for good: how far it has moved by now depends on all that was freed while importing.
ctypes.CDLL("libc.so.6").mallopt(-3, 128 * 1024)
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    blocks = [torch.zeros(500_000) for _ in range(4)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    answer = subprocess.run(
        [sys.executable, "-c", _FAULTS_OF_STEPS, how], capture_output=True, text=True, check=True, timeout=120
    )
    return int(answer.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test_a_step_finds_the_memory_that_the_step_before_it_freed() -> None:
    pages = 20 * 4 * 500_000 * 4 // resource.getpagesize()
    assert faults("keep") < pages / 20 < pages / 2 < faults("release")


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert keep_freed_memory.__wrapped__() is False
