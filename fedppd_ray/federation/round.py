"""The paper's Algorithm 1, one round, independent of where the work runs."""

from collections.abc import Sequence

from fedppd_ray.errors import QuorumError
from fedppd_ray.federation.executor import Arrival, Executor, Lost, ServerLink
from fedppd_ray.federation.failure_policy import Action, FailurePolicy
from fedppd_ray.federation.observer import Observer
from fedppd_ray.federation.types import Failure, Receipt, RoundReport
from fedppd_ray.seeding import numpy_generator_for


def select_clients(clients: Sequence[str], participation: float, seed: int, round_id: int) -> list[str]:
    """The round's participants in a fixed order: a seeded sample of the given share, at least one."""
    count = max(1, round(participation * len(clients)))
    if count >= len(clients):
        return list(clients)
    chosen = numpy_generator_for(seed, "participation", round_id).choice(len(clients), count, replace=False)
    return [clients[index] for index in sorted(chosen)]


def federated_round(
    executor: Executor, round_id: int, selected: Sequence[str], policy: FailurePolicy, observer: Observer
) -> RoundReport:
    """Broadcast, local updates, screening, aggregation in a fixed order, server update.

    Updates are folded into the aggregate in the order of `selected`, whatever order they arrive in; until its
    turn an update waits where the executor keeps it. Too few usable updates raise QuorumError before the server's state
    changes.
    """
    server, clients = executor.server, executor.clients
    clients.open(round_id, server.begin(round_id))
    for client in selected:
        clients.start(client)

    attempts = dict.fromkeys(selected, 1)
    arrived: dict[str, Arrival] = {}
    dropped: dict[str, Failure] = {}
    folded: list[Receipt] = []
    turn = 0
    while turn < len(selected):
        event = _screened(server, clients.next_event())
        if isinstance(event, Arrival):
            arrived[event.client] = event
            observer.client_done(event.receipt)
        else:
            failure = Failure(event.client, event.reason)
            action = policy.on_failure(attempts[event.client], event.late)
            observer.client_failed(failure, action)
            if action is Action.RETRY:
                attempts[event.client] += 1
                clients.start(event.client)
            else:
                dropped[event.client] = failure
        # Fold as far as the fixed order allows.
        while turn < len(selected) and (selected[turn] in arrived or selected[turn] in dropped):
            if selected[turn] in arrived:
                folded.append(server.fold(arrived.pop(selected[turn])))
            turn += 1

    _require_quorum(round_id, len(folded), len(selected), policy, dropped)
    server.finish()
    return RoundReport(round_id, tuple(folded), tuple(dropped.values()))


def _screened(server: ServerLink, event: Arrival | Lost) -> Arrival | Lost:
    """An arrival that fails the screen is a lost attempt."""
    if isinstance(event, Lost):
        return event
    reason = server.refusal(event)
    return event if reason is None else Lost(event.client, f"update refused: {reason}")


def _require_quorum(
    round_id: int, usable: int, selected: int, policy: FailurePolicy, dropped: dict[str, Failure]
) -> None:
    needed = policy.needed(selected)
    if usable < needed:
        reasons = "; ".join(f"{failure.client}: {failure.reason}" for failure in dropped.values())
        raise QuorumError(
            f"round {round_id}: {usable} of {selected} clients delivered, the quorum is {needed} "
            f"({reasons}); mend the clients or lower federation.quorum, then continue with --resume"
        )
