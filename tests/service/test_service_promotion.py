"""The whole way, on a live service under load: gates refuse, a shadow is rolled back, a good one is promoted."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedppd_ray.data.datasets import load, load_ood
from fedppd_ray.releases.registry import Registry
from fedppd_ray.runs.export import read_card
from tests.service.exports import export_again, miscalibrated, trained_digits
from tests.service.live import HEADERS, ROOT, fedppd_serve

CONNECTIONS = 16
GATES = """
offline:
  accuracy: {worse_by: 2}
  ece: {at_most: 8}
  coverage: {at_least: 80}
live: {requests: 200, latency: null}
"""


def fedppd(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fedppd_ray", *map(str, arguments)]
    environment = os.environ | {"FEDPPD_BY": "ada@lab", "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def bodies(digits: Any) -> list[bytes]:
    """What comes in after some months: digits, and as many letters, which no client ever saw."""
    letters = load_ood("glyphs", load("mnist5k", None).info, None)
    generator = np.random.default_rng(0)
    images = [
        digits.images[generator.integers(500)] if odd else letters[generator.integers(len(letters))]
        for odd in [True, False] * 100
    ]
    return [json.dumps({"instances": [np.asarray(image)[0].tolist()]}).encode() for image in images]


async def under_load(url: str, bodies: list[bytes], work: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Sixteen connections that never pause, until `work`, in a thread, is done."""
    seen: Counter[str] = Counter()
    done, turn = asyncio.Event(), count()

    async def one(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            try:
                answer = await client.post(f"{url}/predict", content=bodies[next(turn) % len(bodies)])
                ok = answer.status_code == 200
                seen[answer.json()["model"]["version"] if ok else f"failed: {answer.status_code}"] += 1
            except httpx.HTTPError as error:
                seen[f"failed: {error!r}"] += 1

    headers = {"Content-Type": "application/json", **HEADERS}
    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=60) as client:
        callers = [asyncio.create_task(one(client)) for _ in range(CONNECTIONS)]
        try:
            result = await asyncio.to_thread(work)
        finally:
            done.set()
            await asyncio.gather(*callers)
    return result, seen


@pytest.mark.timeout(600)
def test_sixteen_connections_see_nothing_of_what_gates_decide(
    digits_run: Path, tmp_path: Path, bodies: list[bytes]
) -> None:
    folder = tmp_path / "registry"
    gates = tmp_path / "gates.yaml"
    gates.write_text(GATES)

    def promote(run: Path, *options: object) -> "subprocess.CompletedProcess[str]":
        return fedppd("promote", run, "--to", folder, "--gates", gates, *options)

    assert promote(digits_run).returncode == 0
    registry = Registry.open(folder)
    first = registry.state().current
    wrong, other, good = (Path(shutil.copytree(digits_run, tmp_path / name)) for name in ("wrong", "other", "good"))
    miscalibrated(wrong, 2)
    shutil.rmtree(other)
    trained_digits(other, seed=7)
    export_again(good, 4)

    def until_decided() -> None:
        for _ in range(1200):
            if registry.state().candidate is None:
                return
            asyncio.run(asyncio.sleep(0.1))
        raise AssertionError(f"no decision: {httpx.get(f'{server.url}/model').json()['trial']}")

    def story() -> list[Any]:
        refused = promote(wrong, "--shadow", 1)
        shadow = promote(other, "--shadow", 1)
        until_decided()
        rolled_back = registry.state()
        fine = promote(good, "--shadow", 1)
        until_decided()
        return [refused, shadow, rolled_back, fine]

    with fedppd_serve(folder, tmp_path / "log") as server:
        (refused, shadow, rolled_back, fine), seen = asyncio.run(under_load(server.url, bodies, story))
        wait = httpx.get(f"{server.url}/model").json()
    assert refused.returncode == 1, refused
    assert "ece" in refused.stderr
    assert (shadow.returncode, fine.returncode) == (0, 0), (shadow, fine)
    assert rolled_back.current == first, "one that passes offline but disagrees in shadow is rolled back"
    assert registry.state().current != first
    assert wait["version"] == read_card(good)["version"]
    assert {name: number for name, number in seen.items() if name.startswith("failed")} == {}
    assert set(seen) == {read_card(run)["version"] for run in (digits_run, good)}, "a shadow is never returned"
    told = [(entry.who.split(",")[0].split("@")[0], entry.what) for entry in registry.entries()]
    assert told == [
        ("ada", "promoted"),
        ("ada", "refused"),
        ("ada", "candidate"),
        ("service", "rolled back"),
        ("ada", "candidate"),
        ("service", "promoted"),
    ]
    reasons = [entry.why for entry in registry.entries()]
    assert "ece" in reasons[1]
    assert "disagreement" in reasons[3]
    assert "live gates met" in reasons[5]
    assert all(entry.time for entry in registry.entries())
    shown = fedppd("registry", "log", folder)
    assert shown.returncode == 0
    assert "service@" in shown.stdout
