"""The bits of short runs, pinned: code that is not meant to change a result does not change one.

Bits belong to a release of torch and to the CPU, so elsewhere these tests skip and say why. What the numbers ought to
be is for other tests; these tell that something changed, and where. How a run is made is the business of the fixture
`student_digest` (conftest.py): this file stays as it is.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def this_machine() -> str:
    info = Path("/proc/cpuinfo")
    vendors = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("vendor_id")]
    torch_release = torch.__version__.partition("+")[0]
    return f"torch {torch_release}, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()}, {vendors[0]}"


PINNED_ON = "torch 2.13.0, AVX2, x86_64, AuthenticAMD"

_TEACHER = {"rate": 0.12, "rate_step": 2, "rate_gamma": 0.85}
_DISTILL = {"epochs": 2, "batch_size": 64, "samples": 3}
_FEDPPD: dict[str, Any] = {"teacher": _TEACHER, "student": {"rate": 0.06}}
_FEW = {"data": {"partition": {"rows_per_client": 60}}}
_FEW_AND_POOL = {"data": {"server_pool": 100, "partition": {"rows_per_client": 60}}}
_ONE_STEP = {"data": {"partition": {"kind": "iid", "rows_per_client": 60}}}


def _teacher(**changes: Any) -> dict[str, Any]:
    return {**_FEW, **_FEDPPD, "teacher": {**_TEACHER, **changes}}


def _fedavg(**changes: Any) -> dict[str, Any]:
    return {**_FEW, "method": "fedavg", "baseline": {"rate": 0.06, **changes}}


# What runs → its settings, and the sha256 of the exported student's vector after two rounds.
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "quickstart, average": (_FEDPPD, "e7aee88f8ef79af6407e2d4b8a7331607494fc19e20f1b595a67c1e7a7fb51ec"),
    "quickstart, distill": (
        {**_FEDPPD, "data": {"server_pool": 400}, "server": {"aggregate": "distill", "distill": _DISTILL}},
        "3b80a7c2aa6c0121627adbaee955a20201d8c94a9bb752151ad7bea9dad88b90",
    ),
    "fedppd, per iteration": (
        {**_FEW, **_FEDPPD, "student": {"rate": 0.06, "distill_every": "iteration"}},
        "9be098649df283ee6db83a04c69178305b73e0993feb270c54221994eee89a51",
    ),
    "fedppd, last sample": (_teacher(send="last"), "6bc35eaa1e9db64169559ad53afda3f55dc688f1e45d18d96beca7b5b34ef0b2"),
    "fedppd, augmented and decaying": (
        {**_FEW, **_FEDPPD, "client": {"augment": "crop_flip", "rate_decay": 0.9}},
        "f49973bea286815915e1bee982e11d1273c69f42f40f118103b43b891d1379cd",
    ),
    "fedppd, cyclical": (
        _teacher(sampler="cyclical"),
        "98d4c06a82be2d1d2a8d784354c98eab787e9789931322fd70932efadce3e10d",
    ),
    "fedppd, sghmc": (
        _teacher(sampler="sghmc", rate=0.01),
        "00606dd6dd68bdb41c89d04fddd29548056da475aba85c81d83bf76bee8154c3",
    ),
    "fedppd, psgld": (_teacher(sampler="psgld"), "e2f76d09355b8f896cc50e40068ef1f6876b6dde050353c1e40e79291b569972"),
    "fedavg": (_fedavg(), "604fb686902f9fe4e3912cbe46fbf821af431e222d85762f51a9e7449d7936c7"),
    "fedavg, student's network, momentum": (
        _fedavg(network="student", momentum=0.9, rate=0.03),
        "088fb13d3111275887ea149c0e74f85f97eaff46b311cead3c43cfc455f689be",
    ),
    "fedbe": (
        {**_fedavg(), **_FEW_AND_POOL, "method": "fedbe", "server": {"distill": _DISTILL}},
        "74d8cef80c805c94cdc0bfe3079ed646454f2065a5889f5e12bdf2d133e63913",
    ),
    "fedswag": ({**_fedavg(), "method": "fedswag"}, "aeff2547f9f8375cb5e1fd62c8263da9fba28208689f8bcb958c87d4b00749e1"),
    "fedpa": ({**_fedavg(), "method": "fedpa"}, "a129321881abc8fc0afce012ea0286547806e35e798a336f81633ed0c55633aa"),
    "fedppd, one active step": (
        {**_FEDPPD, **_ONE_STEP, "active": {"labelled": 20, "pool": 40, "budget": 20}},
        "7a5372ed365c75f362f9bd5c3663dc50df6f81e959449a89a535c624af587115",
    ),
}

_BASE: dict[str, Any] = {
    "seed": 0,
    "data": {"name": "mnist5k", "calibration": 400, "partition": {"major": 2, "extra_per_class": 4}},
    "federation": {"clients": 10, "rounds": 2},
    "client": {"epochs": 5, "batch_size": 40},
    "evaluation": {"every": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_of_a_run_are_what_they_were(
    name: str, tmp_path: Path, student_digest: Callable[[dict[str, Any], dict[str, Any], Path], str]
) -> None:
    if this_machine() != PINNED_ON:
        pytest.skip(f"the bits are pinned for {PINNED_ON}; this is {this_machine()}")
    settings, pinned = RUNS[name]
    assert student_digest(_BASE, settings, tmp_path) == pinned
