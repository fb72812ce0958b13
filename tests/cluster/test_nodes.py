"""Several raylets on this machine, and real kill -9 of one of them in mid-round."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from fedppd_ray.config.schema import client_ids
from fedppd_ray.data.datasets import load
from fedppd_ray.errors import QuorumError, ResourceError
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.round import federated_round
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.workers.serial import SerialExecutor
from tests.runtime.conftest import Recorder, run, tiny_config


class Nodes:
    """A head and two workers with a label each."""

    def __init__(self) -> None:
        # A dead node is noticed after a second and a half, not after fifteen.
        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
        )
        self._workers = {site: self._cluster.add_node(num_cpus=1, labels={"fl-site": site}) for site in "ab"}
        ray.init(address=self._cluster.address, logging_level=logging.ERROR)

    def kill(self, site: str) -> None:
        """The node's raylet and all of its workers, at once and without warning."""
        raylet = self._workers[site].all_processes["raylet"][0].process.pid
        children = [
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == raylet
        ]
        for pid in [raylet, *children]:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    yield cluster
    cluster.close()


def killing(nodes: Nodes, site: str, round_id: int) -> Recorder:
    """An observer that kills a node when the first client of a round has delivered."""
    killed: list[int] = []

    def on_client(receipt: Any) -> None:
        if receipt.round == round_id and not killed:
            killed.append(round_id)
            nodes.kill(site)

    return Recorder(on_client=on_client)


def test_a_node_that_dies_in_mid_round_costs_nothing_but_time(nodes, tmp_path):
    config = tiny_config(federation={"clients": 6, "rounds": 3, "retries": 2})
    executor = RayExecutor(config, client_ids(6))
    spread = {host.node for host in executor.hosts._hosts}
    assert len(spread) > 1
    observer = killing(nodes, "a", round_id=2)
    state = run(config, tmp_path / "run", executor, observer)
    assert [record["clients"] for record in observer.records] == [6, 6, 6]
    assert observer.failures or observer.servers_lost
    serial = run(config, tmp_path / "serial", SerialExecutor(config, client_ids(6)), Recorder())
    for role in state.models:
        assert state.models[role].tobytes() == serial.models[role].tobytes()


def pinned(tmp_path: Path, quorum: float) -> Any:
    """client-00 and client-01 live at site a, with data of their own there."""
    rows = load("mnist5k").train
    for number in (0, 1):
        folder = tmp_path / f"site-{number}"
        folder.mkdir()
        np.save(folder / "images.npy", rows.images[number::100, 0])
        np.save(folder / "labels.npy", rows.labels[number::100])
    clients = {
        f"client-0{number}": {"label_selector": {"fl-site": "a"}, "data": str(tmp_path / f"site-{number}")}
        for number in (0, 1)
    }
    clients["client-0[23]"] = {"label_selector": {"fl-site": "b"}}
    return tiny_config(
        federation={"clients": 4, "rounds": 3, "quorum": quorum}, clients=clients, resources={"start_timeout_s": 20}
    )


@pytest.mark.long
def test_clients_pinned_to_a_dead_node_are_dropped_by_name_and_the_rest_go_on(nodes, tmp_path):
    config = pinned(tmp_path, quorum=0.5)
    executor = RayExecutor(config, client_ids(4))
    homes = {host.name: host.node for host in executor.hosts._hosts}
    labels = {node["NodeID"]: node["Labels"].get("fl-site") for node in ray.nodes()}
    assert [labels[homes[client]] for client in client_ids(4)] == ["a", "a", "b", "b"]
    assert {info.client: info.rows for info in executor.clients.describe()} == {
        "client-00": 40, "client-01": 40, "client-02": 48, "client-03": 48,
    }  # fmt: skip

    def kill_before_round_two(round_id: int) -> None:
        if round_id == 2:
            nodes.kill("a")

    observer = Recorder(on_round=kill_before_round_two)
    run(config, tmp_path / "run", executor, observer)
    assert [(record["clients"], record["failed"]) for record in observer.records] == [(4, 0), (2, 2), (2, 2)]
    for record in observer.records[1:]:
        assert sorted(failure["client"] for failure in record["failures"]) == ["client-00", "client-01"]
    # The quorum decides: half of the clients are not enough for three quarters, and the state stays as it was.
    with pytest.raises(QuorumError, match=r"round 4: 2 of 4 clients delivered, the quorum is 3.*client-0[01]"):
        federated_round(executor, 4, client_ids(4), FailurePolicy(retries=0, quorum=0.75), Recorder())
    assert executor.server.state().round == 3


@pytest.mark.long
def test_the_quorum_decides_when_a_dead_node_takes_too_many_clients_along(nodes, tmp_path):
    config = pinned(tmp_path, quorum=0.75)
    observer = Recorder(on_round=lambda round_id: nodes.kill("a") if round_id == 2 else None)
    with pytest.raises(
        QuorumError, match=r"round 2: 2 of 4 clients delivered, the quorum is 3.*client-0[01].*--resume"
    ):
        run(config, tmp_path / "run", RayExecutor(config, client_ids(4)), observer)
    assert (tmp_path / "run" / "checkpoints" / "round-000001" / "manifest.json").exists()
    assert (tmp_path / "run" / "student" / "model.json").exists()


def test_a_label_that_no_node_has_is_refused_at_once(nodes):  # noqa: ARG001
    config = tiny_config(clients={"client-00": {"label_selector": {"fl-site": "mars"}}})
    with pytest.raises(ResourceError, match=r"client-00 wants a node with labels.*mars.*'fl-site': 'a'"):
        RayExecutor(config, client_ids(3))
