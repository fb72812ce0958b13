"""Live gates: one look, after enough requests."""

import numpy as np
import pytest

from fedppd_ray.releases.live import Answers, Decision, LiveGates, Tally, decide

ROWS = 100


def answers(
    different: int = 0, entropy: float = 0.5, abstains: int = 5, seconds: float = 1.0, size: float | None = None
) -> Answers:
    labels = np.zeros(ROWS, np.int64)
    labels[:different] = 1
    declined = (np.arange(ROWS) < abstains).astype(float)
    sizes = None if size is None else np.full(ROWS, size)
    return Answers(labels, np.full(ROWS, entropy), declined, seconds, sizes)


def decided(candidate: Answers, current: Answers | None = None, requests: int = 500) -> Decision | None:
    tally = Tally()
    tally.add(current or answers(), candidate, requests)
    return decide(LiveGates(), tally, 0.0)


def test_nothing_is_decided_on_too_few_requests() -> None:
    assert decided(answers(different=ROWS), requests=499) is None


def test_nothing_is_decided_before_its_time() -> None:
    tally = Tally()
    tally.add(answers(), answers(), 1000)
    gates = LiveGates(minutes=10)
    assert decide(gates, tally, 599.0) is None
    assert decide(gates, tally, 600.0) is not None


def test_one_that_does_the_same_is_promoted() -> None:
    decision = decided(answers())
    assert decision is not None
    assert decision.promote
    assert "500 requests, 100 rows" in decision.why


@pytest.mark.parametrize(
    ("candidate", "name"),
    [
        (answers(different=6), "disagreement 6.00 %"),
        (answers(entropy=0.71), "entropy +0.210"),
        (answers(entropy=0.29), "entropy -0.210"),
        (answers(abstains=11), "abstention +6.00"),
        (answers(abstains=0), None),
        (answers(seconds=2.1), "latency 2.10"),
        (answers(size=3.5), None),  # the current version has no sets to compare with
    ],
)
def test_each_bound_is_looked_at_in_both_directions(candidate: Answers, name: str | None) -> None:
    decision = decided(candidate)
    assert decision is not None
    assert decision.promote is (name is None)
    assert (name or "met") in decision.why


def test_set_sizes_count_where_both_have_them() -> None:
    decision = decided(answers(size=3.5), answers(size=2.0))
    assert decision is not None
    assert not decision.promote
    assert "set size +1.500" in decision.why


def test_one_failure_is_enough() -> None:
    tally = Tally()
    tally.fail()
    decision = decide(LiveGates(), tally, 0.0)
    assert decision is not None
    assert not decision.promote


def test_a_bound_that_is_null_is_not_looked_at() -> None:
    tally = Tally()
    tally.add(answers(), answers(different=ROWS), 500)
    decision = decide(LiveGates(disagreement=None), tally, 0.0)
    assert decision is not None
    assert decision.promote
