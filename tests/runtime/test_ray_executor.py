"""The executor on real Ray: same bits as without it, and what happens when processes die, hang or lie."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import client_ids
from fedppd_ray.data.sums_file import section_of
from fedppd_ray.errors import DataError, QuorumError, ResourceError
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.round import federated_round
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.runtime.table_sums import sums_on_nodes
from fedppd_ray.workers.serial import SerialExecutor
from tests.runtime.conftest import Recorder, run, tiny_config


def assert_same_bits(one: GlobalState, other: GlobalState) -> None:
    assert one.round == other.round
    assert set(one.models) == set(other.models)
    for role in one.models:
        assert one.models[role].tobytes() == other.models[role].tobytes(), role


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> GlobalState:
    """The tiny run without Ray."""
    config = tiny_config()
    folder = tmp_path_factory.mktemp("serial") / "run"
    return run(config, folder, SerialExecutor(config, client_ids(3)), Recorder())


def pid_of(actor: object) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _self: os.getpid())))  # type: ignore[attr-defined]


def test_ray_equals_serial_bit_for_bit(ray_executor, tmp_path, reference):
    assert_same_bits(run(tiny_config(), tmp_path / "run", ray_executor(tiny_config()), Recorder()), reference)


def test_ray_equals_serial_for_server_distillation(ray_executor, tmp_path):
    config = tiny_config(server={"aggregate": "distill", "distill": {"epochs": 2, "samples": 2}}, data__server_pool=50)
    on_ray = run(config, tmp_path / "ray", ray_executor(config), Recorder())
    serial = run(config, tmp_path / "serial", SerialExecutor(config, client_ids(3)), Recorder())
    assert_same_bits(on_ray, serial)


def test_the_hospitals_on_ray_equal_serial_ones(ray_executor, tmp_path):
    config = load_config("hospital", {"federation.rounds": 2, "client.epochs": 1})
    serial = run(config, tmp_path / "serial", SerialExecutor(config, client_ids(5)), Recorder())
    assert_same_bits(run(config, tmp_path / "ray", ray_executor(config), Recorder()), serial)


TABLE_DATA = {"name": "table", "table": {"target": "y"}}


@pytest.mark.usefixtures("ray_cluster")
def test_sums_of_tables_are_made_where_the_files_are_and_errors_name_the_client(tmp_path):
    clients = {}
    for number, rows in enumerate(("61,ill\n50,well\n", "40,well\n,ill\n")):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"age,y\n{rows}")
        clients[f"client-0{number}"] = {"data": str(path)}
    section = section_of(list(sums_on_nodes(clients, TABLE_DATA).values()), {"target": "y"})
    (age,) = section["columns"]
    assert (age["mean"], age["low"], age["high"], age["missing"]) == (pytest.approx(151 / 3), 40, 61, True)
    assert section["classes"] == ["ill", "well"]
    clients["client-01"] = {"data": str(tmp_path / "nothing.csv")}
    with pytest.raises(DataError, match=r"^client-01: .*nothing.csv: no such file"):
        sums_on_nodes(clients, TABLE_DATA)


def test_predictions_on_ray_equal_serial_ones(ray_executor):
    config = tiny_config()
    on_ray, serial = ray_executor(config), SerialExecutor(config, client_ids(3))
    on_ray.server.install(None)
    serial.server.install(None)
    for split in ("test", "calibration", "ood"):
        assert np.array_equal(on_ray.evaluation.predict(split), serial.evaluation.predict(split)), split


def test_a_client_killed_in_mid_round_is_retried_and_changes_no_bit(ray_executor, tmp_path, reference):
    executor = ray_executor(tiny_config())
    victim = pid_of(executor.hosts._of["client-01"][0].handle)

    def kill_soon(round_id: int) -> None:
        if round_id == 1:
            os.kill(victim, signal.SIGSTOP)  # it is given its task and cannot finish it before it dies
            threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()

    observer = Recorder(on_round=kill_soon)
    assert_same_bits(run(tiny_config(), tmp_path / "run", executor, observer), reference)
    assert [(client, action) for client, _, action in observer.failures] == [("client-01", "retry")]
    assert [record["clients"] for record in observer.records] == [3, 3]


def test_a_bundle_that_dies_with_its_process_is_sent_again_one_by_one_and_is_nobodys_failure(ray_executor, tmp_path):
    config = tiny_config(federation__clients=8, federation__retries=0, resources={"actors": 2})
    executor = ray_executor(config)
    victim = pid_of(executor.hosts._of["client-00"][0].handle)
    alone: set[str] = set()

    def kill_soon(round_id: int) -> None:
        if round_id == 2:
            executor.clients._seconds = 1e-3  # however slow the machine: the first calls carry four clients
            os.kill(victim, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()

    observer = Recorder(on_round=kill_soon, on_client=lambda _receipt: alone.update(executor.clients._alone))
    state = run(config, tmp_path / "ray", executor, observer)
    assert observer.failures == []
    assert [record["clients"] for record in observer.records] == [8, 8]
    assert len(alone) == 4
    assert_same_bits(state, run(config, tmp_path / "serial", SerialExecutor(config, client_ids(8)), Recorder()))


def test_a_server_killed_in_mid_round_is_restored_and_changes_no_bit(ray_executor, tmp_path, reference):
    executor = ray_executor(tiny_config())
    done: list[str] = []

    def kill_server(receipt) -> None:
        done.append(receipt.client)
        if receipt.round == 2 and done.count(receipt.client) == 2:
            # Answers that came before the driver noticed may find it dead already.
            with contextlib.suppress(RayActorError):
                os.kill(pid_of(executor.server.handle), signal.SIGKILL)

    observer = Recorder(on_client=kill_server)
    assert_same_bits(run(tiny_config(), tmp_path / "run", executor, observer), reference)
    assert observer.servers_lost
    assert set(observer.servers_lost) == {2}


def test_a_client_that_hangs_past_the_deadline_is_dropped_and_comes_back(ray_executor, tmp_path):
    config = tiny_config(federation__deadline_s=10, federation__rounds=3)
    executor = ray_executor(config)
    stuck = pid_of(executor.hosts._of["client-02"][0].handle)

    def hang(round_id: int) -> None:
        if round_id == 1:
            os.kill(stuck, signal.SIGSTOP)

    observer = Recorder(on_round=hang)
    began = time.monotonic()
    run(config, tmp_path / "run", executor, observer)
    # On a busy machine its new process may not be up before the second deadline; it must be there in the third round.
    assert {(client, action) for client, _, action in observer.failures} == {("client-02", "drop")}
    assert all("deadline" in reason for _, reason, _ in observer.failures)
    outcome = [(record["clients"], record["failed"]) for record in observer.records]
    assert (outcome[0], outcome[-1]) == ((2, 1), (3, 0))
    assert time.monotonic() - began < 100
    assert pid_of(executor.hosts._of["client-02"][0].handle) != stuck


def test_a_late_answer_is_ignored(ray_executor, tmp_path):
    """A client that misses the deadline of round 1 and works on afterwards: as if it had not taken part in it."""
    config = tiny_config(federation__deadline_s=8)
    executor = ray_executor(config)
    slow = pid_of(executor.hosts._of["client-02"][0].handle)
    observer = Recorder(on_round=lambda round_id: os.kill(slow, signal.SIGSTOP) if round_id == 1 else None)
    dropped = observer.client_failed

    def wake(failure, action) -> None:
        dropped(failure, action)
        os.kill(slow, signal.SIGCONT)
        time.sleep(2)  # time enough to finish, and to answer late

    observer.client_failed = wake
    state = run(config, tmp_path / "run", executor, observer)
    assert [(record["clients"], record["failed"]) for record in observer.records] == [(2, 1), (3, 0)]
    serial = SerialExecutor(tiny_config(), client_ids(3))
    serial.server.install(None)
    policy = FailurePolicy(retries=0, quorum=0.5)
    federated_round(serial, 1, client_ids(3)[:2], policy, Recorder())
    federated_round(serial, 2, client_ids(3), policy, Recorder())
    assert_same_bits(state, serial.server.state())
    assert pid_of(executor.hosts._of["client-02"][0].handle) == slow  # it stopped by itself, and was not killed


def test_updates_that_are_not_finite_stop_the_run_below_quorum_with_the_last_round_intact(ray_executor, tmp_path):
    config = tiny_config(teacher={"rate": 1e30}, federation__retries=0)
    executor = ray_executor(config)
    observer = Recorder()
    with pytest.raises(QuorumError, match="NaN or infinite"):
        run(config, tmp_path / "run", executor, observer)
    state = executor.server.state()
    assert state.round == 0
    assert all(np.isfinite(vector).all() for vector in state.models.values())
    assert {client for client, _, _ in observer.failures} == set(client_ids(3))


def test_weights_in_the_object_store_are_not_changed_by_a_client_that_trains_on_them(ray_executor):
    executor = ray_executor(tiny_config())
    executor.server.install(None)
    executor.clients.open(1, executor.server.begin(1))
    before = {role: vector.copy() for role, vector in ray.get(executor.clients._state_ref).models.items()}
    executor.clients.start("client-00")
    executor.clients.next_event()
    after = ray.get(executor.clients._state_ref).models
    assert all(np.array_equal(before[role], after[role]) for role in before)


@pytest.mark.usefixtures("ray_cluster")
def test_a_gpu_that_nobody_has_is_refused_at_once():
    from fedppd_ray.runtime.ray_executor import RayExecutor

    config = tiny_config(resources={"client_gpus": 1})
    with pytest.raises(ResourceError, match=r"client-00 asks for 1 GPU.*0 GPU"):
        RayExecutor(config, client_ids(3))


@pytest.mark.usefixtures("ray_cluster")
def test_a_busy_cluster_fails_within_the_time_limit_and_says_what_is_free():
    from fedppd_ray.runtime.ray_executor import RayExecutor

    @ray.remote(num_cpus=2)
    class Hog:
        def ready(self) -> None:
            return None

    hog = Hog.remote()
    ray.get(hog.ready.remote())
    began = time.monotonic()
    config = tiny_config(resources={"start_timeout_s": 3})
    with pytest.raises(ResourceError, match=r"did not start within 3 s.*asks for 0\.5 CPU"):
        RayExecutor(config, client_ids(3))
    assert time.monotonic() - began < 20
    ray.kill(hog)
