"""Held-out data and the parts in which evaluation is shared out."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.glyphs import draw_glyphs
from fedppd_ray.data.partition import partition
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.inference.held_out import HeldOut, part_bounds
from fedppd_ray.inference.predictor import BATCH, network_predictor
from fedppd_ray.methods import build_method
from fedppd_ray.workers.client import ClientWorker

Tiny = Callable[..., Config]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12_000), st.integers(1, 40))
def test_parts_cover_every_row_once_and_are_cut_at_batches(rows: int, parts: int) -> None:
    bounds = [part_bounds(rows, part, parts) for part in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == rows
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(first % BATCH == 0 or first == rows for first, _ in bounds)


def test_predictions_do_not_depend_on_how_many_share_the_work(tiny: Tiny) -> None:
    config = tiny()
    method = build_method(config)
    state = GlobalState(0, method.initial_models())
    whole = HeldOut(config).log_probabilities(method.predictor(state.models), "test")
    worker = ClientWorker(config, ["client-00"])
    pieces = [worker.predict(state, "test", part, 3) for part in range(3)]
    assert whole.shape == (1000, 10)
    assert np.array_equal(np.concatenate(pieces), whole)


def test_predictions_are_normalised_log_probabilities_without_dropout(tiny: Tiny) -> None:
    config = tiny()
    method = build_method(config)
    models = method.initial_models()
    student = method.student(models)
    student.module.train()  # as after a local update
    held_out = HeldOut(config)
    first = held_out.log_probabilities(network_predictor(student), "calibration")
    assert first.dtype == np.float64
    assert np.exp(first).sum(1) == pytest.approx(np.ones(40), abs=1e-12)
    assert np.array_equal(first, held_out.log_probabilities(method.predictor(models), "calibration"))


def test_calibration_and_pool_are_the_partitions_and_no_clients(tiny: Tiny) -> None:
    config = tiny()
    held_out, data = HeldOut(config), load("mnist5k")
    split = partition(np.asarray(data.train.labels), 10, config.data, 3, config.seed)
    assert np.array_equal(held_out.images("calibration"), data.train.images[split.calibration])
    assert np.array_equal(held_out.labels("calibration"), data.train.labels[split.calibration])
    assert len(held_out.server_pool()) == len(split.server_pool) == 30
    assert held_out.server_pool().labels is None
    described = ClientWorker(config, ["client-00", "client-02"]).describe()
    assert [(info.client, info.rows, sum(info.class_counts)) for info in described] == [
        ("client-00", 24, 24),
        ("client-02", 24, 24),
    ]
    assert described[0].class_counts == tuple(np.bincount(data.train.labels[split.clients[0]], minlength=10))


def test_out_of_distribution_rows_are_the_configured_set_or_none(tiny: Tiny) -> None:
    assert np.array_equal(HeldOut(tiny()).images("ood")[:5], draw_glyphs(5, (1, 28, 28)))
    without = HeldOut(tiny(evaluation={"ood": None}))
    assert without.images("ood").shape == (0, 1, 28, 28)
    assert without.log_probabilities(lambda x: x, "ood").shape == (0, 10)


@pytest.mark.parametrize("split", ["train", "server_pool", ""])
def test_an_unknown_split_is_refused(tiny: Tiny, split: str) -> None:
    held_out = HeldOut(tiny())
    with pytest.raises(ValueError, match="no split"):
        held_out.images(split)
    with pytest.raises(ValueError, match="has no labels"):
        held_out.labels(split)


def test_a_cancelled_round_stays_cancelled_and_later_ones_run(tiny: Tiny) -> None:
    from fedppd_ray.errors import LocalUpdateCancelled

    config = tiny()
    worker = ClientWorker(config, ["client-00"])
    state = GlobalState(0, build_method(config).initial_models())
    worker.cancel(1)
    worker.cancel(0)
    with pytest.raises(LocalUpdateCancelled):
        worker.local_update("client-00", state)
    update = worker.local_update("client-00", GlobalState(1, state.models))
    assert update.receipt.round == 2
    assert update.receipt.rows == 24


def test_no_message_of_a_client_holds_its_rows(tiny: Tiny) -> None:
    """Weights, counts and metrics only: nothing in an update is as large as the images or equal to the labels."""
    config = tiny()
    worker = ClientWorker(config, ["client-00"])
    update = worker.local_update("client-00", GlobalState(0, build_method(config).initial_models()))
    assert set(update.models) == {"teacher", "student"}
    assert all(isinstance(value, float) for value in update.receipt.metrics.values())
    assert set(vars(update)) == {"receipt", "models"}
    assert not torch.is_tensor(update.models["student"])
