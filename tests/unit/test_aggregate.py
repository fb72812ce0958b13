"""The weighted average, and the screen that no bad update passes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.config.schema import Config
from fedppd_ray.federation.aggregate import StreamingAverage
from fedppd_ray.federation.screen import refusal
from fedppd_ray.federation.types import ClientUpdate, Receipt
from fedppd_ray.workers.server import ServerWorker

SIZES = {"teacher": 6, "student": 9}


def sound() -> ClientUpdate:
    models = {"teacher": np.ones(6, np.float32), "student": np.full(9, 2, np.float32)}
    return ClientUpdate(Receipt("client-01", 5, 40), models)


def with_models(**changes: object) -> ClientUpdate:
    return replace(sound(), models={**sound().models, **changes})  # type: ignore[arg-type]


def with_receipt(**changes: object) -> ClientUpdate:
    return replace(sound(), receipt=replace(sound().receipt, **changes))  # type: ignore[arg-type]


def spoiled(value: float, at: int = 3) -> np.ndarray:
    vector = np.ones(9, np.float32)
    vector[at] = value
    return vector


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(0, 999))
def test_the_average_is_weighted_by_rows(rows: list[int], seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(len(rows), 7)).astype(np.float32)
    average = StreamingAverage(7)
    for vector, weight in zip(vectors, rows, strict=True):
        average.add(vector, weight)
    expected = np.average(vectors.astype(np.float64), axis=0, weights=rows)
    np.testing.assert_allclose(average.result(), expected, rtol=1e-6, atol=1e-7)
    assert average.result().dtype == np.float32


def test_the_average_of_one_is_itself_bit_for_bit() -> None:
    vector = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    average = StreamingAverage(1000)
    average.add(vector, 321)
    assert np.array_equal(average.result(), vector)


def test_an_average_of_large_values_does_not_overflow() -> None:
    average = StreamingAverage(1)
    for _ in range(3):
        average.add(np.array([3e38], np.float32), 5000)
    assert average.result() == pytest.approx(3e38, rel=1e-6)


def test_an_average_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="average of nothing"):
        StreamingAverage(3).result()


def test_a_sound_update_passes() -> None:
    assert refusal("client-01", sound(), 5, SIZES) is None


BAD = [
    pytest.param(with_models(student=spoiled(np.nan)), "student has 1 NaN or infinite values of 9", id="NaN"),
    pytest.param(with_models(student=spoiled(np.inf, 8)), "student has 1 NaN or infinite", id="Inf at the end"),
    pytest.param(with_models(student=spoiled(-np.inf, 0)), "student has 1 NaN or infinite", id="-Inf at the start"),
    pytest.param(with_models(teacher=np.full(6, np.nan, np.float32)), "teacher has 6 NaN", id="all NaN"),
    pytest.param(with_models(student=np.ones(8, np.float32)), "student is float32 (8,)", id="too short"),
    pytest.param(with_models(student=np.ones((3, 3), np.float32)), "student is float32 (3, 3)", id="matrix"),
    pytest.param(with_models(student=np.ones(1, np.float32)), "student is float32 (1,)", id="would broadcast"),
    pytest.param(with_models(student=np.ones(9)), "student is float64", id="float64"),
    pytest.param(with_models(student=np.ones(9, np.int32)), "student is int32", id="integers"),
    pytest.param(with_models(student=[1.0] * 9), "student is list", id="a list"),
    pytest.param(with_models(extra=np.ones(9, np.float32)), "sent models", id="a role too many"),
    pytest.param(replace(sound(), models={"student": np.ones(9, np.float32)}), "sent models", id="a role missing"),
    pytest.param(with_receipt(round=4), "answers round 4, not 5", id="the round before"),
    pytest.param(with_receipt(round=6), "answers round 6, not 5", id="the round after"),
    pytest.param(with_receipt(client="client-02"), "is signed by client-02", id="another client"),
    pytest.param(with_receipt(rows=0), "claims 0 rows", id="no rows"),
    pytest.param(with_receipt(rows=-5), "claims -5 rows", id="negative rows"),
    pytest.param(with_receipt(rows=2.5), "claims 2.5 rows", id="half a row"),
    pytest.param(with_receipt(rows=True), "claims True rows", id="a truth value"),
    pytest.param(with_receipt(rows=float("nan")), "claims nan rows", id="NaN rows"),
]


@pytest.mark.parametrize(("update", "reason"), BAD)
def test_a_bad_update_is_refused_with_its_reason(update: ClientUpdate, reason: str) -> None:
    assert (refusal("client-01", update, 5, SIZES) or "").startswith(reason)


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Config]) -> ServerWorker:
    return ServerWorker(tiny())


def real_update(server: ServerWorker, client: str, value: float) -> ClientUpdate:
    models = {role: np.full(vector.shape, value, np.float32) for role, vector in server.state().models.items()}
    return ClientUpdate(Receipt(client, 1, 10), models)


@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_server_folds_no_bad_update_even_if_told_to(server: ServerWorker, role: str, value: float) -> None:
    server.install(None)
    server.begin(1)
    server.fold(real_update(server, "client-00", 1.0))
    bad = real_update(server, "client-01", 1.0)
    bad.models[role][7] = value
    with pytest.raises(ValueError, match="client-01: update refused"):
        server.fold(bad)
    server.fold(real_update(server, "client-02", 3.0))
    server.finish()
    for vector in server.state().models.values():
        assert (vector == 2.0).all()  # the mean of the two sound ones


def test_a_server_without_state_or_round_says_that_it_was_lost(
    server: ServerWorker, tiny: Callable[..., Config]
) -> None:
    from fedppd_ray.errors import ServerLostError

    with pytest.raises(ServerLostError, match="no state"):
        ServerWorker(tiny()).state()
    server.install(None)
    with pytest.raises(ServerLostError, match="is at round 0, asked for round 2"):
        server.begin(2)
    with pytest.raises(ServerLostError, match="in no round"):
        server.finish()
