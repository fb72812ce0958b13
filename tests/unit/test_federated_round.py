"""One round: fixed order of aggregation, retries, drops, quorum, and a screen that nothing bad passes."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedppd_ray.config.schema import Config, client_ids
from fedppd_ray.errors import QuorumError
from fedppd_ray.federation.executor import Arrival, Executor, Lost
from fedppd_ray.federation.failure_policy import Action, FailurePolicy
from fedppd_ray.federation.round import federated_round, select_clients
from fedppd_ray.federation.types import ClientInfo, ClientUpdate, GlobalState, Receipt
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.serial import SerialEvaluator, SerialExecutor, SerialServer
from fedppd_ray.workers.server import ServerWorker

CLIENTS = client_ids(5)
POLICY = FailurePolicy(retries=1, quorum=0.5)
Answer = ClientUpdate | Lost


class ScriptedExecutor:
    """A real server; clients answer from a script, attempt by attempt, in a given order of arrival."""

    def __init__(self, server: ServerWorker, script: Mapping[str, Sequence[Answer]], priority: Sequence[str]) -> None:
        self.server = WatchedServer(server)
        self.clients = ScriptedClients(script, priority)
        self.evaluation = SerialEvaluator(server)

    @property
    def started(self) -> list[str]:
        return self.clients.started

    @property
    def folded(self) -> list[str]:
        return self.server.folded

    def close(self) -> None:
        return None


class WatchedServer(SerialServer):
    def __init__(self, worker: ServerWorker) -> None:
        super().__init__(worker)
        self.folded: list[str] = []

    def fold(self, arrival: Arrival) -> Receipt:
        self.folded.append(arrival.client)
        return super().fold(arrival)


class ScriptedClients:
    def __init__(self, script: Mapping[str, Sequence[Answer]], priority: Sequence[str]) -> None:
        self._script = {client: deque(answers) for client, answers in script.items()}
        self._priority = list(priority)
        self._out: list[str] = []
        self.started: list[str] = []

    def describe(self) -> list[ClientInfo]:
        return []

    def open(self, round_id: int, published: object) -> None:
        self._out.clear()

    def start(self, client: str) -> None:
        self.started.append(client)
        self._out.append(client)

    def next_event(self) -> Arrival | Lost:
        client = min(self._out, key=self._priority.index)
        self._out.remove(client)
        answer = self._script[client].popleft()
        return answer if isinstance(answer, Lost) else Arrival(client, answer.receipt, answer.models)


@pytest.fixture(scope="module")
def config(tiny: Callable[..., Config]) -> Config:
    return tiny(federation={"clients": len(CLIENTS)})


@pytest.fixture(scope="module")
def server(config: Config) -> ServerWorker:
    return ServerWorker(config)


@pytest.fixture(scope="module")
def updates(config: Config, server: ServerWorker) -> dict[str, ClientUpdate]:
    """Real updates of all clients for round 1."""
    server.install(None)
    worker = ClientWorker(config, CLIENTS)
    return {client: worker.local_update(client, server.state()) for client in CLIENTS}


@pytest.fixture(scope="module")
def after_serial(config: Config) -> GlobalState:
    """The state after round 1 by the executor that runs one client after the other."""
    from conftest import Watcher

    executor = SerialExecutor(config, CLIENTS)
    executor.server.install(None)
    federated_round(executor, 1, CLIENTS, POLICY, Watcher())
    return executor.server.state()


def run(executor: Executor, watcher: Any, policy: FailurePolicy = POLICY, selected: Sequence[str] = CLIENTS) -> Any:
    executor.server.install(None)
    return federated_round(executor, 1, selected, policy, watcher)


def equal(first: GlobalState, second: GlobalState) -> bool:
    return first.round == second.round and all(
        np.array_equal(first.models[role], second.models[role]) for role in first.models
    )


def spoiled(update: ClientUpdate) -> ClientUpdate:
    models = {role: vector.copy() for role, vector in update.models.items()}
    models["student"][17] = np.nan
    return replace(update, models=models)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(CLIENTS))
def test_arrival_order_cannot_change_a_bit(
    server: ServerWorker,
    updates: dict[str, ClientUpdate],
    after_serial: GlobalState,
    watcher: Any,
    order: list[str],
) -> None:
    executor = ScriptedExecutor(server, {client: [updates[client]] for client in CLIENTS}, order)
    report = run(executor, watcher)
    assert executor.folded == CLIENTS
    assert [receipt.client for receipt in report.accepted] == CLIENTS
    assert equal(executor.server.state(), after_serial)


@pytest.fixture(scope="module")
def distilling(tiny: Callable[..., Config]) -> ServerWorker:
    """A server whose aggregate, unlike an exact sum, does depend on the order of its members."""
    return ServerWorker(tiny(federation={"clients": len(CLIENTS)}, server={"aggregate": "distill"}))


def distilled(
    server: ServerWorker,
    updates: dict[str, ClientUpdate],
    watcher: Any,
    arrival: Sequence[str],
    selected: Sequence[str],
) -> GlobalState:
    executor = ScriptedExecutor(server, {client: [updates[client]] for client in CLIENTS}, arrival)
    run(executor, watcher, selected=selected)
    return executor.server.state()


def test_arrival_order_cannot_change_a_bit_of_a_distilled_model(
    distilling: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    expected = distilled(distilling, updates, watcher, CLIENTS, CLIENTS)
    shuffler = random.Random(0)
    for order in (list(reversed(CLIENTS)), *(shuffler.sample(CLIENTS, len(CLIENTS)) for _ in range(2))):
        assert equal(distilled(distilling, updates, watcher, order, CLIENTS), expected)


def test_another_order_of_folding_would_change_bits(
    distilling: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    """Otherwise the test above would prove nothing."""
    expected = distilled(distilling, updates, watcher, CLIENTS, CLIENTS)
    turned = list(reversed(CLIENTS))
    assert not equal(distilled(distilling, updates, watcher, turned, turned), expected)


def test_a_failed_attempt_is_retried_and_then_counts(
    server: ServerWorker, updates: dict[str, ClientUpdate], after_serial: GlobalState, watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    script[CLIENTS[2]].insert(0, Lost(CLIENTS[2], "the actor died"))
    executor = ScriptedExecutor(server, script, CLIENTS)
    report = run(executor, watcher)
    assert report.failures == ()
    assert executor.started.count(CLIENTS[2]) == 2
    assert [(failure.client, action) for failure, action in watcher.failed] == [(CLIENTS[2], Action.RETRY)]
    assert equal(executor.server.state(), after_serial)


def test_a_client_that_fails_again_is_dropped_with_its_reason(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    script[CLIENTS[0]] = [Lost(CLIENTS[0], "first"), Lost(CLIENTS[0], "second")]
    executor = ScriptedExecutor(server, script, CLIENTS)
    report = run(executor, watcher)
    assert [(failure.client, failure.reason) for failure in report.failures] == [(CLIENTS[0], "second")]
    assert [action for _, action in watcher.failed] == [Action.RETRY, Action.DROP]
    assert [receipt.client for receipt in report.accepted] == CLIENTS[1:]
    assert executor.server.state().round == 1


def test_the_state_without_a_dropped_client_is_the_average_of_the_others(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    script[CLIENTS[3]] = [Lost(CLIENTS[3], "gone"), Lost(CLIENTS[3], "gone")]
    executor = ScriptedExecutor(server, script, list(reversed(CLIENTS)))
    run(executor, watcher)
    others = [updates[client] for client in CLIENTS if client != CLIENTS[3]]
    expected = np.mean([update.models["teacher"].astype(np.float64) for update in others], axis=0)
    np.testing.assert_allclose(executor.server.state().models["teacher"], expected, rtol=1e-6, atol=1e-8)


def test_who_missed_the_deadline_is_not_retried(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    script[CLIENTS[4]] = [Lost(CLIENTS[4], "missed the deadline", late=True)]
    executor = ScriptedExecutor(server, script, CLIENTS)
    report = run(executor, watcher, FailurePolicy(retries=5, quorum=0.5))
    assert executor.started.count(CLIENTS[4]) == 1
    assert [failure.client for failure in report.failures] == [CLIENTS[4]]


def test_below_quorum_the_round_raises_and_the_state_is_unchanged(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    for client in CLIENTS[:3]:
        script[client] = [Lost(client, f"{client} is ill")] * 2
    executor = ScriptedExecutor(server, script, CLIENTS)
    executor.server.install(None)
    before = executor.server.state()
    kept = {role: vector.copy() for role, vector in before.models.items()}
    with pytest.raises(QuorumError) as caught:
        federated_round(executor, 1, CLIENTS, POLICY, watcher)
    message = str(caught.value)
    assert message.startswith("round 1: 2 of 5 clients delivered, the quorum is 3")
    assert all(f"{client} is ill" in message for client in CLIENTS[:3])
    assert "--resume" in message
    assert equal(executor.server.state(), GlobalState(0, kept))


def test_a_round_after_a_failed_one_starts_clean(
    server: ServerWorker, updates: dict[str, ClientUpdate], after_serial: GlobalState, watcher: Any
) -> None:
    """Updates folded before the quorum was missed must not count twice."""
    gone: dict[str, list[Answer]] = {client: [Lost(client, "gone")] for client in CLIENTS}
    gone[CLIENTS[0]] = [updates[CLIENTS[0]]]
    with pytest.raises(QuorumError):
        run(ScriptedExecutor(server, gone, CLIENTS), watcher, FailurePolicy(0, 0.5))
    again = ScriptedExecutor(server, {client: [updates[client]] for client in CLIENTS}, CLIENTS)
    federated_round(again, 1, CLIENTS, POLICY, watcher)
    assert equal(again.server.state(), after_serial)


def test_exactly_the_quorum_is_enough(server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    for client in CLIENTS[:2]:
        script[client] = [Lost(client, "ill")] * 2
    report = run(ScriptedExecutor(server, script, CLIENTS), watcher)
    assert len(report.accepted) == 3


def test_a_refused_update_is_retried_then_dropped_and_never_folded(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any
) -> None:
    script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
    script[CLIENTS[1]] = [spoiled(updates[CLIENTS[1]])] * 2
    executor = ScriptedExecutor(server, script, CLIENTS)
    report = run(executor, watcher)
    assert CLIENTS[1] not in executor.folded
    assert [failure.reason for failure in report.failures] == [
        "update refused: student has 1 NaN or infinite values of 85670"
    ]
    assert CLIENTS[1] not in [receipt.client for receipt in watcher.done]
    assert all(np.isfinite(vector).all() for vector in executor.server.state().models.values())


@pytest.mark.parametrize(
    "forge",
    [
        lambda update: replace(update, receipt=replace(update.receipt, round=2)),
        lambda update: replace(update, receipt=replace(update.receipt, client=CLIENTS[0])),
        lambda update: replace(update, receipt=replace(update.receipt, rows=0)),
        lambda update: replace(update, models={"student": update.models["student"]}),
    ],
    ids=["wrong round", "wrong client", "no rows", "role missing"],
)
def test_a_forged_update_is_as_good_as_lost(
    server: ServerWorker, updates: dict[str, ClientUpdate], watcher: Any, forge: Callable[[ClientUpdate], ClientUpdate]
) -> None:
    def state_with(answers: list[Answer]) -> GlobalState:
        script: dict[str, list[Answer]] = {client: [updates[client]] for client in CLIENTS}
        script[CLIENTS[1]] = answers
        executor = ScriptedExecutor(server, script, CLIENTS)
        run(executor, watcher)
        return executor.server.state()

    forged = state_with([forge(updates[CLIENTS[1]])] * 2)
    assert equal(forged, state_with([Lost(CLIENTS[1], "gone")] * 2))


def test_the_serial_executor_reports_a_clients_exception_as_lost(config: Config, watcher: Any) -> None:
    executor = SerialExecutor(config, CLIENTS[:3])  # the worker knows nothing of the other two
    executor.server.install(None)
    report = federated_round(executor, 1, CLIENTS, POLICY, watcher)
    assert [failure.client for failure in report.failures] == CLIENTS[3:]
    assert all(failure.reason.startswith("KeyError") for failure in report.failures)


def test_two_serial_rounds_continue_from_each_other(config: Config, watcher: Any) -> None:
    executor = SerialExecutor(config, CLIENTS)
    executor.server.install(None)
    states = [executor.server.state()]
    for round_id in (1, 2):
        federated_round(executor, round_id, CLIENTS, POLICY, watcher)
        states.append(executor.server.state())
    assert [state.round for state in states] == [0, 1, 2]
    assert not np.array_equal(states[1].models["student"], states[2].models["student"])
    assert {receipt.round for receipt in watcher.done} == {1, 2}


# ---- participation


def test_full_participation_selects_everyone_in_order() -> None:
    assert select_clients(CLIENTS, 1.0, 0, 1) == CLIENTS


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.floats(0.01, 1), st.integers(0, 2**32), st.integers(1, 500))
def test_a_sample_has_the_asked_share_no_one_twice_and_a_fixed_order(
    count: int, share: float, seed: int, round_id: int
) -> None:
    clients = client_ids(count)
    chosen = select_clients(clients, share, seed, round_id)
    assert len(chosen) == max(1, round(share * count))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(clients)
    assert chosen == select_clients(clients, share, seed, round_id)


def test_rounds_and_seeds_draw_their_own_samples() -> None:
    clients = client_ids(40)
    samples = {tuple(select_clients(clients, 0.5, seed, round_id)) for seed in (0, 1) for round_id in range(1, 11)}
    assert len(samples) == 20


def test_over_many_rounds_everyone_takes_part_equally_often() -> None:
    clients, rounds = client_ids(10), 2000
    counts = dict.fromkeys(clients, 0)
    for round_id in range(rounds):
        for client in select_clients(clients, 0.3, 7, round_id):
            counts[client] += 1
    # Binomial: 600 ± sqrt(2000 · 0.3 · 0.7) = 20.5.
    assert max(abs(count - 600) for count in counts.values()) < 5 * 20.5
