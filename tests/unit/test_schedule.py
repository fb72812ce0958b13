"""What follows the planned rounds: the cosine, the rates by it, and why such a run is resumed with as many rounds."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedppd_ray.bayes.schedule import begun, over_rounds
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.identity import binding, conflicts
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.methods.settings import rate_factor

COSINE = {"rate_schedule": "cosine"}
METHODS = ["fedppd", "fedavg"]


def config_of(rounds: int = 5, **changes: Any) -> Config:
    data = {"partition": {"kind": "iid", "rows_per_client": 24}}
    client = {"epochs": 1, "batch_size": 12, **changes.pop("client", {})}
    federation = {"clients": 2, "rounds": rounds}
    return parse_config({"data": data, "federation": federation, "client": client, **changes})


def test_the_cosine_is_the_equation() -> None:
    values = [over_rounds(0.5, 0.1, r, 5) for r in range(1, 6)]
    assert values == pytest.approx([0.1 + 0.2 * (1 + math.cos(math.pi * at)) for at in (0, 0.25, 0.5, 0.75, 1)])
    assert (values[0], values[2], values[4]) == pytest.approx((0.5, 0.3, 0.1))


def test_a_constant_is_exactly_that_and_one_round_has_its_start() -> None:
    assert [over_rounds(0.3, 0.3, r, 7) for r in range(1, 8)] == [0.3] * 7
    assert over_rounds(0.3, 0.1, 1, 1) == 0.3


@pytest.mark.parametrize(("start", "rounds", "first"), [(0.75, 200, 151), (0.0, 200, 1), (0.29, 100, 30), (0.9, 3, 3)])
def test_what_begins_late_begins_after_its_share_of_the_rounds(start: float, rounds: int, first: int) -> None:
    assert next(r for r in range(1, rounds + 1) if begun(start, r, rounds)) == first


def test_rates_end_at_two_percent_by_cosine_or_fall_by_their_factor() -> None:
    by_cosine = config_of(client=COSINE)
    assert [rate_factor(by_cosine, r) for r in (1, 3, 5)] == pytest.approx([1, 0.51, 0.02])
    assert [rate_factor(config_of(client={"rate_decay": 0.5}), r) for r in (1, 2, 3)] == [1, 0.5, 0.25]


@pytest.fixture(scope="module")
def shard() -> ImageShard:
    train = load("mnist5k").train
    return ImageShard(train.images[::133][:24], train.labels[::133][:24], config_of().dataset)


def sent(config: Config, shard: ImageShard, round_id: int) -> dict[str, np.ndarray]:
    method = build_method(config)
    state = GlobalState(round_id - 1, method.initial_models())
    return dict(method.local_update("client-00", state, shard, lambda: False).models)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_by_cosine_is_a_round_at_that_rate_noise_included(method: str, shard: ImageShard) -> None:
    """Round 3 of 5 has .51 of every rate: bit for bit a run whose rates are .51 of these."""
    factor = rate_factor(config_of(client=COSINE), 3)
    rates = {"fedppd": {"teacher": 0.08, "student": 0.06}, "fedavg": {"baseline": 0.05}}[method]
    ours = sent(
        config_of(method=method, client=COSINE, **{key: {"rate": rate} for key, rate in rates.items()}), shard, 3
    )
    slower = {key: {"rate": rate * factor} for key, rate in rates.items()}
    expected = sent(config_of(method=method, **slower), shard, 3)
    assert all(np.array_equal(ours[role], expected[role]) for role in ours)


@pytest.mark.parametrize("method", METHODS)
def test_a_cosine_that_ends_where_it_starts_is_todays_bits(method: str, shard: ImageShard) -> None:
    flat = sent(config_of(method=method, client={**COSINE, "rate_end": 1.0}), shard, 4)
    plain = sent(config_of(method=method), shard, 4)
    assert all(np.array_equal(flat[role], plain[role]) for role in plain)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({**COSINE, "rate_decay": 0.9}, r"client\.rate_decay: .*cosine lowers the rates already"),
        ({"rate_end": 0.1}, r"client\.rate_end: only client\.rate_schedule=cosine"),
        ({**COSINE, "rate_end": 0}, r"client\.rate_end"),
    ],
)
def test_senseless_schedules_are_refused(client: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(client=client)


# ---- resuming

BOUND: list[dict[str, Any]] = [
    {"client": COSINE},
    {"client": {"outliers": {"weight": 0.1}}},
    {"student": {"label_weight": 0.5, "label_weight_end": 0.1}},
]
FREE: list[dict[str, Any]] = [
    {},
    {"client": {"outliers": {"weight": 0.1, "start": 0.0}}},
    {"student": {"label_weight": 0.5, "label_weight_end": 0.5}},
    {"student": {"label_weight": 0.5}},
]


@pytest.mark.parametrize("settings", BOUND)
def test_what_follows_the_rounds_binds_their_number(settings: dict[str, Any]) -> None:
    assert "federation.rounds" in binding(config_of(**settings))
    (line,) = conflicts(config_of(5, **settings), config_of(9, **settings))
    section = next(iter(settings))
    assert line.startswith(f"federation.rounds: 5 -> 9, on which {section}.")


@pytest.mark.parametrize("settings", FREE)
def test_where_nothing_follows_the_rounds_their_number_is_free(settings: dict[str, Any]) -> None:
    assert conflicts(config_of(5, **settings), config_of(9, **settings)) == []


def test_a_run_by_cosine_is_not_resumed_with_more_rounds(train_run: Callable[..., Any], tmp_path: Path) -> None:
    train_run(config_of(1, method="fedavg", client=COSINE), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"federation\.rounds: 1 -> 2, on which client\.rate_schedule depends"):
        train_run(config_of(2, method="fedavg", client=COSINE), tmp_path / "run", resume=True)
