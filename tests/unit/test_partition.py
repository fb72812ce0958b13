"""Who holds which rows: disjoint, complete, deterministic in the seed, and as skewed as asked."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedppd_ray.config.data import DataConfig
from fedppd_ray.data.partition import Partition, partition
from fedppd_ray.errors import ConfigError

CLASSES = 10
LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(CLASSES), 60))
# 40 writers with 2 to 28 rows each, numbered with gaps.
WRITERS = np.random.default_rng(2).permutation(
    np.repeat(7 * np.arange(40), np.random.default_rng(3).multinomial(600, [1 / 40] * 40))
)


def split(clients: int = 5, seed: int = 0, labels: Any = LABELS, **data: Any) -> Partition:
    held_out = {key: data.pop(key) for key in ("server_pool", "calibration") if key in data}
    part = {"extra_per_class": 5, **data}
    writers = WRITERS if part.get("kind") == "writers" else None
    return partition(labels, CLASSES, DataConfig(partition=part, **held_out), clients, seed, writers)


def everything(result: Partition) -> np.ndarray[Any, Any]:
    return np.concatenate([*result.clients, result.server_pool, result.calibration, result.unused])


def counts(result: Partition) -> np.ndarray[Any, Any]:
    return np.array([np.bincount(LABELS[rows], minlength=CLASSES) for rows in result.clients])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["major_classes", "iid", "dirichlet", "writers"]))
    return {
        "kind": kind,
        "clients": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 2**40)),
        "server_pool": draw(st.integers(0, 120)),
        "calibration": draw(st.integers(0, 120)),
        "rows_per_client": draw(st.none() | st.integers(1, 60)),
        "major": draw(st.integers(1, CLASSES)),
        "extra_per_class": draw(st.integers(0, 4)),
        "alpha": draw(st.floats(0.01, 100)),
    }


@settings(max_examples=150, deadline=None)
@given(requests())
def test_every_row_goes_to_exactly_one_place_or_the_request_is_refused(request: dict[str, Any]) -> None:
    try:
        result = split(**request)
    except ConfigError:
        assume(False)
    assert np.array_equal(np.sort(everything(result)), np.arange(len(LABELS)))
    assert len(result.clients) == request["clients"]
    assert min(len(rows) for rows in result.clients) >= 1
    if request["kind"] == "writers":
        assert len(result.server_pool) >= request["server_pool"]
    else:
        assert len(result.server_pool) == request["server_pool"]
    assert len(result.calibration) == request["calibration"]
    if request["rows_per_client"]:
        assert max(len(rows) for rows in result.clients) <= request["rows_per_client"]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, CLASSES), st.integers(0, 5), st.integers(1, 12), st.none() | st.integers(50, 90), st.integers(0, 99)
)
def test_a_client_has_at_most_m_major_classes(
    major: int, extra: int, clients: int, rows_per_client: int | None, seed: int
) -> None:
    request = {"kind": "major_classes", "major": major, "extra_per_class": extra, "rows_per_client": rows_per_client}
    result = split(clients, seed, **request)
    held = counts(result)
    assert ((held > extra).sum(axis=1) <= major).all()
    assert (held >= extra).all()


@pytest.mark.parametrize("kind", ["major_classes", "iid", "dirichlet", "writers"])
def test_the_same_seed_gives_the_same_partition(kind: str) -> None:
    first, second = (split(kind=kind, server_pool=50, calibration=20) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first.clients, second.clients, strict=True))
    assert np.array_equal(first.server_pool, second.server_pool)
    assert np.array_equal(first.calibration, second.calibration)


@pytest.mark.parametrize("kind", ["major_classes", "iid", "dirichlet", "writers"])
def test_another_seed_gives_another_partition(kind: str) -> None:
    first, second = (split(kind=kind, seed=seed, server_pool=50, calibration=20) for seed in (0, 1))
    assert not any(np.array_equal(a, b) for a, b in zip(first.clients, second.clients, strict=True))
    assert not np.array_equal(first.server_pool, second.server_pool)
    assert not np.array_equal(first.calibration, second.calibration)


def test_row_numbers_are_sorted() -> None:
    result = split(server_pool=50, calibration=20)
    for rows in (*result.clients, result.server_pool, result.calibration, result.unused):
        assert np.array_equal(rows, np.sort(rows))


@pytest.mark.parametrize("major", [1, 2, 3])
def test_major_classes_are_dealt_evenly(major: int) -> None:
    held = counts(split(10, kind="major_classes", major=major, extra_per_class=1))
    majors = (held > 1).sum(axis=0)
    assert (majors == major).all()


def test_a_client_takes_as_much_from_each_of_its_major_classes() -> None:
    held = counts(split(5, kind="major_classes", major=2, extra_per_class=1, rows_per_client=41))
    for row in held:
        assert sorted(row[row > 1]) == [16, 17]  # 10 extras and 31 more from two classes
        assert row.sum() == 41


def test_without_a_limit_major_classes_hand_out_everything() -> None:
    assert len(split(10, kind="major_classes", major=2, extra_per_class=2).unused) == 0


def test_iid_clients_hold_equal_numbers_give_or_take_one() -> None:
    sizes = [len(rows) for rows in split(7, kind="iid").clients]
    assert sum(sizes) == len(LABELS)
    assert max(sizes) - min(sizes) <= 1


def test_iid_clients_hold_exactly_the_rows_asked_for() -> None:
    result = split(7, kind="iid", rows_per_client=13)
    assert [len(rows) for rows in result.clients] == [13] * 7
    assert len(result.unused) == len(LABELS) - 7 * 13


def test_an_iid_client_holds_a_fair_mixture_of_classes() -> None:
    held = counts(split(4, kind="iid"))
    # 150 of 600 rows, 60 a class: hypergeometric, mean 15, variance 60·(1/4)·(3/4)·(600−60)/599 = 10.1.
    assert np.abs(held - 15).max() < 5 * np.sqrt(10.1)


def test_dirichlet_skew_grows_as_alpha_falls() -> None:
    def skew(alpha: float) -> float:
        """Mean share of a client's commonest class."""
        held = np.concatenate([counts(split(5, seed, kind="dirichlet", alpha=alpha)) for seed in range(8)])
        return float((held.max(axis=1) / held.sum(axis=1)).mean())

    skews = [skew(alpha) for alpha in (100.0, 1.0, 0.1)]
    assert skews[0] < 0.2 < skews[1] < skews[2] - 0.1


@pytest.mark.parametrize("alpha", [1e-12, 1e-300])
def test_even_an_absurd_alpha_loses_no_row(alpha: float) -> None:
    result = split(2, kind="dirichlet", alpha=alpha)
    assert np.array_equal(np.sort(everything(result)), np.arange(len(LABELS)))


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        ({"clients": 601}, "federation.clients"),
        ({"server_pool": 400, "calibration": 196}, "federation.clients"),
        ({"kind": "iid", "rows_per_client": 121}, "data.partition.rows_per_client"),
        ({"kind": "major_classes", "rows_per_client": 49}, "data.partition.rows_per_client"),
        ({"kind": "major_classes", "extra_per_class": 13}, "data.partition.extra_per_class"),
        ({"kind": "dirichlet", "alpha": 0.001, "clients": 40}, "data.partition.alpha"),
    ],
)
def test_an_impossible_request_is_refused_by_its_key(request_: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split(**request_)
    assert str(caught.value).startswith(f"{key}:")


def test_the_remedy_for_too_many_extras_works() -> None:
    with pytest.raises(ConfigError, match="lower it to at most 12"):
        split(kind="major_classes", extra_per_class=13)
    assert len(split(kind="major_classes", extra_per_class=12).clients) == 5


def test_a_client_without_a_row_is_refused() -> None:
    labels = np.zeros(600, np.int64)  # the other nine classes are empty
    with pytest.raises(ConfigError, match=r"data\.partition: a client would hold no row"):
        split(10, labels=labels, kind="major_classes", major=1, extra_per_class=0)


# ---- by writers


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 200), st.integers(0, 60), st.none() | st.integers(30, 90), st.integers(0, 99))
def test_no_writer_is_in_two_places(
    clients: int, pool: int, calibration: int, rows_per_client: int | None, seed: int
) -> None:
    request = {"server_pool": pool, "calibration": calibration, "rows_per_client": rows_per_client}
    result = split(clients, seed, kind="writers", **request)
    places = [set(WRITERS[rows]) for rows in (*result.clients, result.server_pool)]
    assert sum(len(writers) for writers in places) == len(set().union(*places))


def test_without_calibration_a_client_holds_every_row_of_its_writers() -> None:
    result = split(6, kind="writers", server_pool=100)
    for rows in (*result.clients, result.server_pool):
        assert np.array_equal(rows, np.flatnonzero(np.isin(WRITERS, WRITERS[rows])))
    assert len(result.unused) == 0


def test_the_pool_takes_no_writer_more_than_it_needs() -> None:
    for wanted in (1, 50, 100, 200):
        rows = split(6, kind="writers", server_pool=wanted).server_pool
        assert wanted <= len(rows) < wanted + np.bincount(WRITERS).max()


def test_clients_of_whole_writers_hold_about_as_much_as_each_other() -> None:
    sizes = [len(rows) for rows in split(6, kind="writers").clients]
    # Longest first: the largest and the smallest differ by no more than the shortest writers can mend.
    assert max(sizes) - min(sizes) <= np.bincount(WRITERS).max() / 2
    assert sum(sizes) == len(WRITERS)


@pytest.mark.parametrize(
    "request_", [{"clients": 41}, {"server_pool": 580, "clients": 5}, {"rows_per_client": 1}, {"calibration": 595}]
)
def test_too_few_writers_for_the_clients_are_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition: by writers, \d+ of \d+ clients would hold no row"):
        split(kind="writers", **request_)


def test_rows_without_writers_cannot_be_split_by_them() -> None:
    with pytest.raises(ConfigError, match=r"data\.partition\.kind: mnist5k does not say who wrote a row"):
        partition(LABELS, CLASSES, DataConfig(partition={"kind": "writers"}), 3, 0)


def test_where_clients_have_folders_the_common_rows_are_the_servers() -> None:
    result = split(0, kind="folders", server_pool=50, calibration=20)
    assert result.clients == ()
    assert (len(result.server_pool), len(result.calibration), len(result.unused)) == (50, 20, 530)


def test_prolific_writers_are_no_likelier_than_others_and_another_seed_has_others() -> None:
    """Longest first over all writers would give every seed the same few, the most prolific."""
    seeds, everyone = 40, np.unique(WRITERS)
    chosen = [
        np.unique(WRITERS[np.concatenate(split(3, seed, kind="writers", rows_per_client=50).clients)])
        for seed in range(seeds)
    ]
    often = np.array([sum(writer in held for held in chosen) for writer in everyone])
    # A writer is chosen with about the same chance p for every seed: binomial, five deviations.
    chance = np.mean([len(held) for held in chosen]) / len(everyone)
    assert np.abs(often - seeds * chance).max() < 5 * np.sqrt(seeds * chance * (1 - chance))
