"""Server momentum: its equation, whom it concerns, and that a resumed run has it too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.federation.momentum import with_momentum
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Receipt
from fedppd_ray.methods import build_method
from fedppd_ray.methods.fedswag import MEAN
from fedppd_ray.runs.store import RunStore

AVERAGING = ["fedavg", "fedswag", "fedpa", "fedppd"]


def config_of(method: str, momentum: float, rounds: int = 4, **changes: Any) -> Config:
    values = {
        "method": method,
        "data": {"partition": {"kind": "iid", "rows_per_client": 24}},
        "federation": {"clients": 2, "rounds": rounds, "server_momentum": momentum},
        "client": {"epochs": 2, "batch_size": 12},
        "evaluation": {"every": 10},
    }
    return parse_config({**values, **changes})


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_three_rounds_by_hand() -> None:
    """μ = .5, means 1, 2 and 2: v = 1, 1.5, .25 and θ = 1, 2.5, 2.75; the last number is a buffer, always the mean."""
    state = GlobalState(0, {"model": vector(0, 10)})
    seen = []
    for mean in (vector(1, 11), vector(2, 12), vector(2, 13)):
        models, kept = with_momentum(state, {"model": mean}, {"model": 1}, 0.5)
        state = GlobalState(state.round + 1, models, kept)
        seen.append((*models["model"].tolist(), *kept["velocity/model"].tolist()))
    assert seen == [(1, 11, 1), (2.5, 12, 1.5), (2.75, 13, 0.25)]


def test_without_momentum_the_averages_pass_untouched_and_nothing_is_kept() -> None:
    averages = {"model": vector(0.1, 0.2), "other": vector(3)}
    models, kept = with_momentum(GlobalState(0, {"model": vector(1, 1)}), averages, {"model": 2}, 0.0)
    assert kept == {}
    assert all(models[role] is averages[role] for role in averages)


def next_state(config: Config, state: GlobalState, step: float, pool: Shard | None = None) -> GlobalState:
    """A round in which every client sends what it was sent plus `step`, and ones of what is new."""
    method = build_method(config)
    aggregation = method.aggregation(state)
    for index in range(2):
        models = {
            role: state.models[role] + np.float32(step) if role in state.models else np.ones(size, np.float32)
            for role, size in method.update_sizes(state).items()
        }
        aggregation.fold(ClientUpdate(Receipt(f"client-{index:02d}", state.round + 1, 10), models))
    result = aggregation.finish(pool)
    return GlobalState(state.round + 1, result.models, result.kept)


@pytest.mark.parametrize("method", AVERAGING)
def test_every_role_of_every_averaging_method_has_it(method: str) -> None:
    config = config_of(method, 0.5)
    start = GlobalState(0, build_method(config).initial_models())
    first = next_state(config, start, 0.5)
    second = next_state(config, first, 0.5)
    for role, before in start.models.items():
        np.testing.assert_allclose(first.models[role], before + 0.5, atol=1e-5)
        np.testing.assert_allclose(second.models[role], before + 0.5 + (0.5 * 0.5 + 0.5), atol=1e-5)
    assert set(second.kept) == {f"velocity/{role}" for role in start.models}
    assert second.broadcast().kept == {}


def test_it_is_there_in_fedswags_last_round_and_leaves_its_gaussian_alone() -> None:
    config = config_of("fedswag", 0.5, rounds=2)
    start = GlobalState(0, build_method(config).initial_models())
    last = next_state(config, next_state(config, start, 0.5), 0.5)
    np.testing.assert_allclose(last.models["model"], start.models["model"] + 1.25, atol=1e-5)
    assert np.array_equal(last.models[MEAN], np.ones_like(last.models[MEAN]))
    assert set(last.kept) == {"velocity/model"}


@pytest.mark.parametrize("method", ["fedbe", "fedppd"])
def test_a_server_that_distils_starts_from_the_average_with_momentum(method: str) -> None:
    """With a rate of next to nothing what is distilled is where it starts."""
    train = load("mnist5k").train
    still = {"epochs": 1, "batch_size": 10, "samples": 1, "teacher_rate": 1e-12, "student_rate": 1e-12}
    server = {"distill": {**still, "weight_decay": 0}, **({"aggregate": "distill"} if method == "fedppd" else {})}
    config = config_of(method, 0.5, data={"server_pool": 20}, server=server)
    pool = ImageShard(train.images[:20], None, config.dataset)
    start = GlobalState(0, build_method(config).initial_models())
    second = next_state(config, next_state(config, start, 0.1, pool), 0.1, pool)
    for role, before in start.models.items():
        np.testing.assert_allclose(second.models[role], before + 0.25, atol=1e-4)
    assert set(second.kept) == {f"velocity/{role}" for role in start.models}


@pytest.mark.parametrize("method", AVERAGING)
def test_no_momentum_is_todays_bits(method: str) -> None:
    plain = {**config_of(method, 0.0).values()}
    del plain["federation"]["server_momentum"]
    start = GlobalState(0, build_method(config_of(method, 0.0)).initial_models())
    ends = []
    for config in (parse_config(plain), config_of(method, 0.0)):
        state = next_state(config, next_state(config, start, 0.3), 0.7)
        assert state.kept == {}
        ends.append(state.models)
    assert all(np.array_equal(ends[0][role], ends[1][role]) for role in ends[0])
    # The average itself, not the start plus a difference that was rounded.
    for role, value in next_state(config_of(method, 0.0), start, 0.3).models.items():
        if method != "fedpa":
            assert np.array_equal(value, start.models[role] + np.float32(0.3))


@pytest.mark.parametrize("method", ["fedavg", "fedppd"])
def test_a_resumed_run_goes_on_with_its_velocity(method: str, train_run: Callable[..., Any], tmp_path: Path) -> None:
    train_run(config_of(method, 0.8, rounds=3), tmp_path / "whole")
    train_run(config_of(method, 0.8, rounds=2), tmp_path / "halves")
    train_run(config_of(method, 0.8, rounds=3), tmp_path / "halves", resume=True)
    whole, halves = (RunStore(tmp_path / name).latest() for name in ("whole", "halves"))
    assert set(whole.kept) == {f"velocity/{role}" for role in whole.models}
    assert all(np.array_equal(whole.models[role], halves.models[role]) for role in whole.models)
    assert all(np.array_equal(whole.kept[name], halves.kept[name]) for name in whole.kept)
