"""One contract for every executor: the same bits, the same failures, the same words for them.

Each test runs without Ray, with it, and with sites over HTTPS. A new executor is one more line in `make`.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.errors import QuorumError, ServerLostError
from fedppd_ray.evaluation.questions import Figures
from fedppd_ray.federation.executor import Arrival, Executor, Lost
from fedppd_ray.federation.failure_policy import FailurePolicy
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.round import federated_round
from fedppd_ray.federation.types import Failure, GlobalState
from fedppd_ray.runtime.ray_executor import RayExecutor
from fedppd_ray.workers.serial import SerialExecutor
from tests.conformance.sites import Sites
from tests.sites.house import wait_for

CLIENTS = client_ids(3)
STRICT = FailurePolicy(retries=0, quorum=0.5)
Make = Callable[..., Executor]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(params=["serial", "ray", "sites"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Executor] = []

    def build(config: Config) -> Executor:
        if request.param == "ray":
            request.getfixturevalue("cluster")
        if request.param == "sites":
            own = {} if config.data.root is None else {c: Path(config.data.root) / "clients" / c for c in CLIENTS}
            made.append(Sites(config, CLIENTS, tmp_path / f"sites-{len(made)}", own))
        else:
            made.append({"serial": SerialExecutor, "ray": RayExecutor}[request.param](config, CLIENTS))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def config_of(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "method": "fedavg",
        "data": {"name": "mnist5k", "calibration": 20, "partition": {"kind": "iid", "rows_per_client": 20}},
        "federation": {"clients": 3, "rounds": 2},
        "client": {"epochs": 1, "batch_size": 10},
        "resources": {"actors": 2},
    }
    return parse_config({**values, **changes})


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A data set whose clients hold folders of their own."""
    generator = np.random.default_rng(0)
    for place, rows in {"train": 20, "test": 20, **{f"clients/{client}": 24 for client in CLIENTS}}.items():
        folder = tmp_path / place
        folder.mkdir(parents=True)
        np.save(folder / "images.npy", generator.integers(0, 256, (rows, 28, 28), np.uint8))
        np.save(folder / "labels.npy", generator.integers(0, 2, rows))
    return tmp_path


def own_data(folder: Path, more: dict[str, Any] | None = None, **changes: Any) -> Config:
    facts = {"classes": ["a", "b"], "shape": [1, 28, 28], "mean": [0.5], "std": [0.3]}
    networks = {"networks": ["mnist_teacher", "mnist_student"]}
    data = {"name": "folder", "root": str(folder), "folder": {**facts, **networks}, "partition": {"kind": "folders"}}
    return config_of(data={**data, **(more or {})}, evaluation={"ood": None}, resources={}, **changes)


class Failures(Observer):
    def __init__(self) -> None:
        self.seen: list[Failure] = []

    def client_failed(self, failure: Failure, action: Any) -> None:
        self.seen.append(failure)


def bits(state: GlobalState) -> dict[str, bytes]:
    return {role: vector.tobytes() for role, vector in state.models.items()}


def counts(executor: Executor) -> list[tuple[str, int]]:
    return [(info.client, info.rows) for info in executor.clients.describe()]


def test_a_round_has_the_bits_of_the_reference(make: Make) -> None:
    config = config_of()
    reference, executor = SerialExecutor(config, CLIENTS), make(config)
    for each in (reference, executor):
        each.server.install(None)
        federated_round(each, 1, CLIENTS, STRICT, Observer())
    assert bits(executor.server.state()) == bits(reference.server.state())
    assert np.array_equal(executor.evaluation.predict("test"), reference.evaluation.predict("test"))
    # A site tells its count when it asks for work again; how many rows of each class is its own business.
    wait_for(lambda: counts(executor) == counts(reference), 30, "the same counts")


def test_data_that_breaks_in_mid_run_costs_the_client_its_round_and_not_the_run(make: Make, folders: Path) -> None:
    config = own_data(folders)
    executor, watching = make(config), Failures()
    executor.server.install(None)
    (folders / "clients" / CLIENTS[1] / "labels.npy").write_bytes(b"no array")
    report = federated_round(executor, 1, CLIENTS, STRICT, watching)
    assert [receipt.client for receipt in report.accepted] == [CLIENTS[0], CLIENTS[2]]
    assert [failure.client for failure in watching.seen] == [CLIENTS[1]]
    assert watching.seen[0].reason.startswith(("DataError: ", "SiteRefusedError: "))
    assert f"{CLIENTS[1]}: its data: " in watching.seen[0].reason
    assert executor.server.state().round == 1


def test_too_many_failures_raise_before_the_state_changes(make: Make, folders: Path) -> None:
    config = own_data(folders)
    executor = make(config)
    executor.server.install(None)
    for client in CLIENTS[:2]:
        (folders / "clients" / client / "images.npy").unlink()
    with pytest.raises(QuorumError, match="1 of 3 clients delivered"):
        federated_round(executor, 1, CLIENTS, STRICT, Observer())
    assert executor.server.state().round == 0


def test_a_server_that_was_given_no_state_says_so(make: Make) -> None:
    executor = make(config_of())
    with pytest.raises(ServerLostError):
        executor.server.begin(1)


def test_a_round_out_of_turn_is_refused(make: Make) -> None:
    executor = make(config_of())
    executor.server.install(None)
    with pytest.raises(ServerLostError, match="round 0, asked for round 2"):
        executor.server.begin(2)


def test_a_round_that_is_begun_again_forgets_the_first_attempt(make: Make) -> None:
    config = config_of()
    reference, executor = SerialExecutor(config, CLIENTS), make(config)
    reference.server.install(None)
    federated_round(reference, 1, CLIENTS, STRICT, Observer())
    executor.server.install(None)
    executor.clients.open(1, executor.server.begin(1))
    executor.clients.start(CLIENTS[0])
    event = executor.clients.next_event()
    assert isinstance(event, Arrival)
    executor.server.fold(event)  # and then the round starts anew
    federated_round(executor, 1, CLIENTS, STRICT, Observer())
    assert bits(executor.server.state()) == bits(reference.server.state())


def test_an_answer_is_an_arrival_and_passes_the_screen(make: Make) -> None:
    executor = make(config_of())
    executor.server.install(None)
    executor.clients.open(1, executor.server.begin(1))
    executor.clients.start(CLIENTS[2])
    event = executor.clients.next_event()
    assert not isinstance(event, Lost)
    assert (event.client, event.receipt.client, event.receipt.round, event.receipt.rows) == (
        CLIENTS[2], CLIENTS[2], 1, 20,
    )  # fmt: skip
    assert executor.server.refusal(event) is None


def test_questions_are_answered_as_the_reference_answers_them(make: Make, folders: Path) -> None:
    config = own_data(folders, {"calibration": 0.5})
    reference, executor = SerialExecutor(config, CLIENTS), make(config)
    for each in (reference, executor):
        each.server.install(None)
        federated_round(each, 1, CLIENTS, STRICT, Observer())
    state = executor.server.state()
    found, expected = executor.clients.ask(Figures(), state), reference.clients.ask(Figures(), state)
    assert list(found) == CLIENTS
    assert [float(answer["rows"]) for answer in found.values()] == [12.0] * 3
    for client, answer in found.items():
        assert {key: value.tobytes() for key, value in answer.items()} == {
            key: value.tobytes() for key, value in expected[client].items()
        }
    # Another state is another answer: nothing is remembered of the round before.
    nothing = GlobalState(0, {role: np.zeros_like(vector) for role, vector in state.models.items()})
    assert float(executor.clients.ask(Figures(), nothing)[CLIENTS[0]]["nll"]) == pytest.approx(np.log(2))


def test_who_keeps_few_rows_back_or_cannot_read_them_is_missing_and_the_others_answer(
    make: Make, folders: Path
) -> None:
    few = folders / "clients" / CLIENTS[2]
    np.save(few / "images.npy", np.zeros((18, 28, 28), np.uint8))
    np.save(few / "labels.npy", np.arange(18) % 2)
    executor = make(own_data(folders, {"calibration": 0.5}))
    executor.server.install(None)
    (folders / "clients" / CLIENTS[0] / "labels.npy").write_bytes(b"no array")
    assert list(executor.clients.ask(Figures(), executor.server.state())) == [CLIENTS[1]]


def test_clients_that_keep_nothing_back_have_nothing_to_say(make: Make) -> None:
    executor = make(config_of())
    executor.server.install(None)
    assert executor.clients.ask(Figures(), executor.server.state()) == {}


def test_rows_that_are_kept_back_are_not_trained_on(make: Make, folders: Path) -> None:
    executor = make(own_data(folders, {"calibration": 0.5}))
    executor.server.install(None)
    report = federated_round(executor, 1, CLIENTS, STRICT, Observer())
    assert [receipt.rows for receipt in report.accepted] == [12] * 3
    wait_for(lambda: [info.rows for info in executor.clients.describe()] == [12] * 3, 30, "the same counts")
