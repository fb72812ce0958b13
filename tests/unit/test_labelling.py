"""Which rows of a client are labelled after some acquisitions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.config.schema import ActiveConfig, Config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.inference.scores import entropy
from fedppd_ray.methods import build_method
from fedppd_ray.workers.client import ClientWorker
from fedppd_ray.workers.labelling import Indices, labelled_rows

Tiny = Callable[..., Config]
ACTIVE = ActiveConfig(labelled=5, pool=12, budget=4)
ROWS = 20


def by_number(rows: Indices) -> np.ndarray:
    """A model that is the less sure the higher a row's number."""
    return rows.astype(np.float64)


def test_the_first_rows_are_a_seeded_draw() -> None:
    first = labelled_rows(ACTIVE, ROWS, 0, "client-00", [])
    assert len(set(first.tolist())) == 5
    assert first.tolist() == sorted(first.tolist())
    assert np.array_equal(first, labelled_rows(ACTIVE, ROWS, 0, "client-00", []))
    assert not np.array_equal(first, labelled_rows(ACTIVE, ROWS, 0, "client-01", []))
    assert not np.array_equal(first, labelled_rows(ACTIVE, ROWS, 1, "client-00", []))


def test_the_rows_of_highest_entropy_are_labelled_next() -> None:
    seen: list[Indices] = []

    def ranking(rows: Indices) -> np.ndarray:
        seen.append(rows)
        return by_number(rows)

    first = set(labelled_rows(ACTIVE, ROWS, 0, "client-00", []).tolist())
    then = set(labelled_rows(ACTIVE, ROWS, 0, "client-00", [ranking]).tolist())
    assert first < then
    assert not set(seen[0].tolist()) & first  # nothing labelled is ranked
    assert len(seen[0]) == 12
    assert then - first == set(sorted(seen[0].tolist())[-4:])


def test_acquisitions_go_on_until_the_pool_is_empty_and_never_label_a_row_twice() -> None:
    active = ActiveConfig(labelled=5, pool=10, budget=4)
    assert active.trainings == 4
    sizes = [len(labelled_rows(active, ROWS, 0, "client-00", [by_number] * steps)) for steps in range(5)]
    assert sizes == [5, 9, 13, 15, 15]
    everything = labelled_rows(active, ROWS, 0, "client-00", [by_number] * 3)
    assert len(set(everything.tolist())) == 15


def test_random_acquisition_ignores_the_model_and_starts_from_the_same_rows() -> None:
    chance = ACTIVE.model_copy(update={"acquisition": "random"})
    assert np.array_equal(labelled_rows(chance, ROWS, 0, "c", []), labelled_rows(ACTIVE, ROWS, 0, "c", []))

    def forbidden(_rows: Indices) -> np.ndarray:
        raise AssertionError("random acquisition asked the model")

    one = labelled_rows(chance, ROWS, 0, "c", [forbidden])
    assert len(one) == 9
    assert not np.array_equal(one, labelled_rows(ACTIVE, ROWS, 0, "c", [by_number]))


def test_a_client_with_too_few_rows_is_told_which_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"client-07 holds 16 rows.*active\.labelled \+ active\.pool = 17"):
        labelled_rows(ACTIVE, 16, 0, "client-07", [])


# ---- in the client's worker


def active_config(tiny: Tiny, **changes: Any) -> Config:
    return tiny(active={"labelled": 6, "pool": 12, "budget": 5}, **changes)


def state_of(config: Config, factor: float) -> GlobalState:
    models = build_method(config).initial_models()
    return GlobalState(9, {role: vector * np.float32(factor) for role, vector in models.items()})


def test_a_client_trains_on_its_labelled_rows_only(tiny: Tiny) -> None:
    config = active_config(tiny)
    states = [state_of(config, 1.5), state_of(config, 2.0)]
    for steps, rows in enumerate((6, 11, 16)):
        worker = ClientWorker(config, ["client-01"], acquisition_states=states[:steps])
        assert worker.describe()[0].rows == rows
        update = worker.local_update("client-01", GlobalState(0, build_method(config).initial_models()))
        assert update.receipt.rows == rows


def test_a_client_labels_what_the_global_student_is_least_sure_of(tiny: Tiny) -> None:
    config = active_config(tiny)
    state = state_of(config, 2.0)
    split = Holdings(config, ["client-01"]).of("client-01")
    images = ImageShard(split.images, None, config.dataset).inputs(torch.arange(len(split)))
    unsure = entropy(build_method(config).predictor(state.models)(images).numpy())
    expected = labelled_rows(config.active, len(split), config.seed, "client-01", [lambda rows: unsure[rows]])  # type: ignore[arg-type]
    worker = ClientWorker(config, ["client-01"], acquisition_states=[state])
    held = worker._training_rows("client-01")
    assert np.array_equal(held.images, split.images[expected])
    assert np.array_equal(held.labels, split.labels[expected])


def test_a_client_started_anew_works_out_the_same_rows(tiny: Tiny) -> None:
    config = active_config(tiny)
    states = [state_of(config, 1.5), state_of(config, 2.0)]
    start = GlobalState(0, build_method(config).initial_models())
    workers = [ClientWorker(config, ["client-00", "client-01"], acquisition_states=states) for _ in range(2)]
    first, second = (worker.local_update("client-01", start).models for worker in workers)
    assert all(np.array_equal(first[role], second[role]) for role in first)
