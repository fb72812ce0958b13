"""What to do about a client that failed."""

import pytest

from fedppd_ray.federation.failure_policy import Action, FailurePolicy


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_client_has_its_retries_and_no_more(retries: int) -> None:
    policy = FailurePolicy(retries, 0.5)
    actions = [policy.on_failure(attempts, late=False) for attempts in range(1, retries + 3)]
    assert actions == [Action.RETRY] * retries + [Action.DROP] * 2


def test_who_is_late_is_dropped_at_once() -> None:
    assert FailurePolicy(9, 0.5).on_failure(1, late=True) is Action.DROP


@pytest.mark.parametrize(
    ("quorum", "selected", "needed"),
    [
        (0.5, 10, 5),
        (0.5, 5, 3),
        (1.0, 10, 10),
        (0.01, 10, 1),
        (0.7, 10, 7),
        (0.71, 10, 8),
        (0.55, 100, 55),  # 0.55 × 100 is 55.00000000000001
        (0.07, 100, 7),
    ],
)
def test_the_quorum_is_the_share_rounded_up(quorum: float, selected: int, needed: int) -> None:
    assert FailurePolicy(0, quorum).needed(selected) == needed
