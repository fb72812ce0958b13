"""The benchmarks answer, and what they compute without a clock is right."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedppd_ray.runtime.bundles import BUNDLE_S, LONGEST_S, TURN_S, bundle_seconds, bundle_size

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = ("round_overhead", "server", "scaling", "evaluation_share", "serve_attack", "site_overhead", "batch_predict")

sys.path.insert(0, str(FOLDER))
from scaling import Costs, projected_seconds  # noqa: E402


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_says_what_it_does_and_has_a_short_version(script: str) -> None:
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--short" in answer
    assert "--json" in answer


def test_one_actor_without_overheads_takes_the_sum_of_the_clients() -> None:
    assert projected_seconds(7, 1, Costs(2.0, 0.0, 0.0, 0.0)) == pytest.approx(14.0)


def test_equal_clients_run_in_waves_of_as_many_as_there_are_actors() -> None:
    assert projected_seconds(10, 4, Costs(1.0, 0.0, 0.0, 0.0)) == pytest.approx(3.0)


def test_the_servers_folds_bound_a_round_however_many_actors_there_are() -> None:
    seconds = projected_seconds(1000, 1000, Costs(1.0, 0.0, 0.01, 0.5))
    assert seconds == pytest.approx(0.5 + 1.0 + 1000 * 0.01)


def test_the_driver_bounds_a_round_of_long_clients() -> None:
    assert projected_seconds(100, 100, Costs(1.0, 0.1, 0.0, 0.0)) == pytest.approx(100 * 0.1 + 1.0)


def test_more_actors_never_slow_a_projected_round_down_where_calls_cost_nothing() -> None:
    taken = [projected_seconds(500, actors, Costs(0.3, 0.0, 0.0, 0.0)) for actors in (1, 2, 8, 32, 128)]
    assert taken == sorted(taken, reverse=True)


def test_clients_of_unknown_or_long_duration_go_one_by_one() -> None:
    assert bundle_size(100, 2, None) == 1
    assert bundle_size(100, 2, 2 * BUNDLE_S) == 1


def test_a_bundle_is_half_of_an_even_share_between_its_time_limits() -> None:
    assert bundle_size(40, 2, BUNDLE_S / 16) == 10
    assert bundle_size(1000, 2, BUNDLE_S / 16) == 16
    assert bundle_size(20, 2, BUNDLE_S / 16) == 6


def test_a_bundle_is_never_more_than_an_even_share() -> None:
    assert bundle_size(12, 2, BUNDLE_S / 1000) == 6
    assert bundle_size(1, 8, BUNDLE_S / 1000) == 1


def test_the_driver_gets_round_to_all_actors_while_one_works_on_a_bundle() -> None:
    for actors in (2, 32, 100):
        assert bundle_seconds(actors) >= TURN_S * actors
    assert bundle_seconds(1000) == LONGEST_S
