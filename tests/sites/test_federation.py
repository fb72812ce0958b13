"""Coordinator and sites as processes, over TLS: the bits of `--serial`, whatever dies on the way."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sites.bad_line import BadLine
from tests.sites.connect_proxy import ConnectProxy
from tests.sites.house import NAMES, House, digest, listening, listening_sockets, wait_for


def finish(house: House, *processes: subprocess.Popen[bytes], seconds: float = 90) -> None:
    for process in processes:
        assert process.wait(seconds) == 0, house.troubles()


def records(out: Path) -> list[tuple[int, int, int]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["round"], line["clients"], line["failed"]) for line in lines]


class Pair:
    """Two sites that run on from one run to the next: starting processes is what takes the time."""

    def __init__(self, house: House) -> None:
        self.house, self.sites = house, list[subprocess.Popen[bytes]]()

    def coordinate(self, out: Path) -> subprocess.Popen[bytes]:
        """A run in which the third client's rows are the coordinator's own."""
        coordinator = self.house.coordinate(self.house.config(sites=(0, 1)), out)
        if not self.sites:
            for index in range(2):
                self.house.join(index)
                student = self.house.folder / f"student-{index}"
                extra = ("--held-out", self.house.data(2), "--student", student)
                self.sites.append(self.house.site(index, *extra, once=False))
        return coordinator


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    house = House(tmp_path_factory.mktemp("pair"))
    made = Pair(house)
    yield made
    try:
        for site in made.sites:
            site.terminate()
        finish(house, *made.sites)
    finally:
        house.close()


def test_sites_give_the_bits_of_serial_and_open_no_port(pair: Pair, reference: str) -> None:
    house, out = pair.house, pair.house.folder / "bits"
    coordinator = pair.coordinate(out)
    wait_for(lambda: "training" in house.log("site-0"), 120, "training at a site")
    assert len(listening_sockets(coordinator.pid)) == 1  # so that nothing is something
    for site in pair.sites:
        assert listening_sockets(site.pid) == []
        assert psutil.Process(site.pid).children(recursive=True) == []
    finish(house, coordinator)
    assert digest(out) == reference
    assert digest(house.folder / "student-1") == reference  # fetched, its signature checked
    key = house.here("keys", "show").strip()
    assert "is signed by" in house.here("keys", "verify", house.folder / "student-1", "--key", key)
    shown = house.here("site", "show", "--home", house.home(0))
    assert shown.count("update") >= 2
    assert "rows told: 30" in shown.replace("\n", " ")
    clients = json.loads((out / "clients.json").read_text())["clients"]
    assert [client["class_counts"] for client in clients[:2]] == [[]] * 2  # the policy keeps them


def test_a_policy_that_says_no_is_heard_on_both_ends_and_figures_leave_with_consent_only(pair: Pair) -> None:
    house, out = pair.house, pair.house.folder / "policies"
    house.change_policy(1, "methods: any ", "methods: [fedavg] ")
    house.change_policy(0, "figures: false", "figures: true")
    finish(house, pair.coordinate(out), seconds=200)
    house.change_policy(1, "methods: [fedavg] ", "methods: any ")
    house.change_policy(0, "figures: true", "figures: false")
    assert records(out) == [(1, 2, 1), (2, 2, 1)]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "its policy says no: methods" in lines[0]["failures"][0]["reason"]
    assert "its policy says no: methods" in house.log("site-1")
    audit = [json.loads(line) for line in (house.home(1) / "audit.jsonl").read_text().splitlines()]
    refused = {entry["run"] for entry in audit if entry["what"] == "refused"}
    assert len(refused) == 1
    assert {entry["what"] for entry in audit if entry.get("run") in refused} == {"refused"}
    told = [json.loads(line) for line in (out / "sites.jsonl").read_text().splitlines()]
    assert [(line["site"], line["round"], line["rows"]) for line in told] == [(NAMES[0], 0, 36.0), (NAMES[0], 1, 36.0)]
    assert "Worst site: hospital-a" in (out / "report.html").read_text()


@pytest.mark.long
def test_the_bits_are_the_same_after_kills_of_site_and_coordinator_over_a_bad_line(
    house: House, reference: str
) -> None:
    """Everything at once, through a proxy that ends TLS, resets, and throttles."""
    out, config = house.folder / "run", house.config()
    coordinator = house.coordinate(config, out)
    wait_for(lambda: listening(house.port), 120, "the coordinator's door")
    proxy = BadLine(house.port, house.certificate, house.key, house.ca, lifetime_s=2.0, bytes_a_second=3e5)
    for index in range(3):
        house.join(index, proxy.port)
    sites = [house.site(index) for index in range(3)]
    wait_for(lambda: house.part_of_an_update(0), 120, "half of an update")
    os.kill(sites[0].pid, signal.SIGKILL)
    sites[0].wait()
    assert house.part_of_an_update(0)
    wait_for(lambda: "training" in house.log("site-1"), 90, "training at another site")
    assert not (out / "metrics.jsonl").exists()  # in the middle of the first round
    os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.wait()
    sites[0] = house.site(0)
    coordinator = house.coordinate(config, out, "--resume-if-exists")
    finish(house, coordinator, *sites, seconds=200)
    assert digest(out) == reference, house.troubles()
    assert records(out) == [(1, 3, 0), (2, 3, 0)]
    assert proxy.breaks > 2
    proxy.close()


@pytest.mark.long
def test_the_bits_are_the_same_after_a_minute_without_a_network_behind_a_tunnelling_proxy(
    house: House, reference: str
) -> None:
    out, proxy = house.folder / "run", ConnectProxy()
    coordinator = house.coordinate(house.config(), out)
    for index in range(3):
        house.join(index)
    sites = [house.site(index, NO_PROXY="", HTTPS_PROXY=proxy.url) for index in range(3)]
    wait_for(lambda: "training" in house.log("site-0"), 120, "training at a site")
    proxy.gone.set()
    time.sleep(60)
    assert all(process.poll() is None for process in (coordinator, *sites))
    proxy.gone.clear()
    finish(house, coordinator, *sites, seconds=200)
    assert digest(out) == reference, house.troubles()
    assert records(out) == [(1, 3, 0), (2, 3, 0)]
    assert set(proxy.targets) == {f"127.0.0.1:{house.port}"}
    assert proxy.lost > 0
    proxy.close()


@pytest.mark.long
def test_two_sites_and_an_actor_on_ray_give_the_bits_of_serial(house: House, reference: str) -> None:
    out = house.folder / "run"
    coordinator = house.coordinate(house.config(sites=(0, 2)), out, serial=False)
    for index in (0, 2):
        house.join(index)
    sites = [house.site(index) for index in (0, 2)]
    finish(house, coordinator, *sites, seconds=200)
    assert digest(out) == reference
