"""Whether served rows still look like the calibration rows: exact tests, and a false-alarm rate that is kept."""

import numpy as np
import pytest
from scipy.stats import binom

from fedppd_ray.inference.drift import (
    Tallies,
    compared,
    directions_for,
    drift_card,
    reference_of,
    stability_index,
    tallied,
)
from fedppd_ray.inference.scores import Floats
from tests.unit.test_conformal import predictions

DIRECTIONS = directions_for(6, 0)


def rows_of(count: int, generator: np.random.Generator) -> Floats:
    return predictions(count, seed=int(generator.integers(2**31)))[0]


def test_a_card_gives_back_what_was_counted() -> None:
    log_p, _ = predictions(300)
    known, directions = reference_of(drift_card(log_p, 0))
    assert np.array_equal(directions, DIRECTIONS)
    assert known.rows == known.entropy.sum() == 300
    assert (known.projections.sum(axis=1) == 300).all()


def test_tallies_of_parts_add_up() -> None:
    log_p, _ = predictions(300)
    whole = tallied(log_p, DIRECTIONS)
    parts = tallied(log_p[:100], DIRECTIONS) + tallied(log_p[100:], DIRECTIONS)
    for name in ("entropy", "classes", "projections"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


@pytest.mark.parametrize(("known", "seen"), [(300, 400), (60, 1000), (1000, 100)])
def test_without_drift_each_test_speaks_no_more_often_than_its_level(known: int, seen: int) -> None:
    """300 pairs of samples of one distribution at a level of 20 % (a third each): binomial, one in a million."""
    generator, level, looks = np.random.default_rng(known), 0.2, 300
    spoken = dict.fromkeys(("entropy", "classes", "projections"), 0)
    for _ in range(looks):
        reference, window = (tallied(rows_of(count, generator), DIRECTIONS) for count in (known, seen))
        for name, finding in compared(reference, window, level, generator).items():
            spoken[name] += finding.drifted
    assert max(spoken.values()) <= binom.ppf(1 - 1e-6, looks, level / 3)


def test_more_doubt_other_classes_and_other_shapes_are_found() -> None:
    generator = np.random.default_rng(0)
    reference = tallied(rows_of(400, generator), DIRECTIONS)
    rows = rows_of(400, generator)
    flat = rows / 3 - np.log(np.exp(rows / 3).sum(1, keepdims=True))
    found = compared(reference, tallied(flat, DIRECTIONS), 1e-4, generator)
    assert found["entropy"].drifted
    assert found["projections"].p < 0.01
    few = rows[rows.argmax(axis=1) < 3]
    found = compared(reference, tallied(few, DIRECTIONS), 1e-4, generator)
    assert found["classes"].drifted
    assert found["classes"].statistic > 0.25  # by the usual reading of the index, a large change


def test_a_change_that_only_projections_show_is_found() -> None:
    """Entropies and predicted classes as they were; which class comes second is another."""
    generator = np.random.default_rng(0)
    reference = tallied(rows_of(400, generator), DIRECTIONS)
    rows = rows_of(400, generator)
    turned = rows.copy()
    order = np.argsort(-rows, axis=1)
    for row, ranked in zip(turned, order, strict=True):
        rest = np.sort(ranked[1:])
        row[rest] = np.sort(row[rest])[::-1]
    found = compared(reference, tallied(turned, DIRECTIONS), 3e-3, generator)
    assert found["projections"].drifted
    assert not found["entropy"].drifted
    assert not found["classes"].drifted


def test_the_stability_index_is_zero_for_equal_shares_and_grows() -> None:
    known = np.array([100, 100, 100])
    index = [stability_index(known, np.array(seen)) for seen in ([100, 100, 100], [120, 90, 90], [200, 50, 50])]
    assert index[0] == 0
    assert index == sorted(index)


def test_a_quiet_window_costs_few_permutations() -> None:
    """20 as extreme ones end it: a level of 10⁻⁷ does not mean ten million draws."""

    class Counting(np.random.Generator):
        drawn = 0

        def multivariate_hypergeometric(self, *arguments: object, size: int, **more: object) -> np.ndarray:
            Counting.drawn += size
            return super().multivariate_hypergeometric(*arguments, size=size, **more)  # type: ignore[arg-type]

    generator = Counting(np.random.PCG64(1))
    pair: list[Tallies] = [tallied(rows_of(300, generator), DIRECTIONS) for _ in range(2)]
    compared(pair[0], pair[1], 1e-7, generator)
    assert Counting.drawn < 20_000
