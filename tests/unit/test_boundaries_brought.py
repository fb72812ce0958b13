"""What users bring, exactly at its edges: columns of a table, dropout of a network, rules, transforms, foreign keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import AGGREGATIONS, TRANSFORMS
from fedppd_ray.config.stored import restricted, upgraded
from fedppd_ray.config.table import ColumnConfig
from fedppd_ray.data.encoding import outside
from fedppd_ray.data.table import ColumnSums, column_facts, sums_of
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.federation.aggregate import build_rule
from fedppd_ray.federation.transforms import transformed
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models, Receipt
from fedppd_ray.models.layers import Dropout
from fedppd_ray.models.own import adopt, try_network
from fedppd_ray.workers.client import ClientWorker

# ---- a column's facts


def column(*values: str | None) -> np.ndarray:
    return np.array(values, object)


def test_mean_and_deviation_are_those_of_the_values_that_are_there() -> None:
    facts = column_facts("x", sums_of(column(None, "1", "2.5", "-3", None, "8")), None)
    assert facts.mean == pytest.approx(8.5 / 4)
    assert facts.std == pytest.approx(np.std([1, 2.5, -3, 8]))
    empty = column_facts("x", sums_of(column(None, None)), None)
    assert (empty.mean, empty.std, empty.low, empty.high) == (0, 1, None, None)


@pytest.mark.parametrize("cut", [0, 1, 30, 99])
def test_a_deviation_that_is_small_against_the_values_survives_the_sums(cut: int) -> None:
    """Seconds since 1970, a second apart in all: E[x²] − E[x]² would be nothing but rounding."""
    numbers = 1.7e9 + 0.01 * np.arange(100)
    values = column(*map(repr, numbers.tolist()))
    facts = column_facts("x", sums_of(values[:cut]) + sums_of(values[cut:]), None)
    assert facts.std == pytest.approx(np.std(numbers), rel=1e-6)


@pytest.mark.parametrize(("value", "rows"), [("0.1", 1000), ("123456.789", 7), ("-0.3", 45), ("0", 3), ("7", 1)])
def test_a_constant_is_not_divided_by_what_rounding_leaves_of_its_deviation(value: str, rows: int) -> None:
    for parts in (1, 3):
        sums = sum((sums_of(column(*[value] * rows)) for _ in range(parts)), ColumnSums())
        assert column_facts("x", sums, None).std == 1


def test_as_many_texts_as_are_allowed_are_categories() -> None:
    assert len(column_facts("x", sums_of(column(*(f"t{n}" for n in range(100)))), None).categories) == 100
    halves = [sums_of(column(*(f"t{n}" for n in part))) for part in (range(60), range(41, 101))]
    with pytest.raises(DataError, match="more than 100"):
        column_facts("x", halves[0] + halves[1], None)


def test_the_least_and_the_largest_value_of_training_are_inside_and_a_new_gap_is_not() -> None:
    facts = [
        ColumnConfig(name="age", kind="numeric", low=20.0, high=80.0),
        ColumnConfig(name="lab", kind="numeric", low=0.0, high=1.0, missing=True),
    ]
    ages = column("20", "80", "19.999", "80.001", None)
    labs = column("0", None, "1", "2", None)
    assert outside({"age": ages, "lab": labs}, facts) == [[], [], ["age"], ["age", "lab"], ["age"]]


# ---- a network's dropout


def test_whole_channels_stay_whole_channels_and_numbers_numbers() -> None:
    module = adopt(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout2d(0.5), nn.Dropout(0.25)), "mine")
    _, by_channel, by_number = module
    assert isinstance(by_channel, Dropout)
    assert isinstance(by_number, Dropout)
    assert (by_channel.channels, by_channel.p) == (True, 0.5)
    assert (by_number.channels, by_number.p) == (False, 0.25)


# ---- rules and transforms by name


def scaled_by(factor: float, plus: float) -> Any:
    def change(update: ClientUpdate, _state: GlobalState, _seed: int) -> ClientUpdate:
        models = {role: np.float32(factor) * vector + np.float32(plus) for role, vector in update.models.items()}
        return replace(update, models=models)

    return change


class Largest:
    """A rule that is no mean."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._found = {role: np.full(size, -np.inf, np.float32) for role, size in sizes.items()}

    def add(self, models: Models, weight: int) -> None:
        self._found = {role: np.maximum(found, models[role]) for role, found in self._found.items()}

    def result(self) -> dict[str, np.ndarray]:
        return self._found


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, items in (
        (AGGREGATIONS, {"largest": Largest}),
        (TRANSFORMS, {"double": scaled_by(2, 0), "one more": scaled_by(1, 1)}),
    ):
        assert list(registry) is not None  # loaded
        monkeypatch.setattr(registry, "_items", {**registry._items, **items})
        monkeypatch.setattr(registry, "_modules", {**registry._modules, **dict.fromkeys(items, __name__)})


def update_of(*values: float) -> ClientUpdate:
    return ClientUpdate(Receipt("client-00", 1, 3), {"model": np.array(values, np.float32)})


@pytest.mark.usefixtures("named")
def test_transforms_follow_each_other_in_the_order_of_their_names() -> None:
    state = GlobalState(0, {})

    def sent(*names: str) -> list[float]:
        return transformed(names, update_of(1, 5), state, 0).models["model"].tolist()

    assert sent() == [1, 5]
    assert sent("double", "one more") == [3, 11]
    assert sent("one more", "double") == [4, 12]


@pytest.mark.usefixtures("named")
def test_a_client_sends_what_its_transforms_leave(tiny: Any) -> None:
    def sent(**client: Any) -> ClientUpdate:
        worker = ClientWorker(tiny(method="fedavg", client=client), ["client-00"])
        return worker.local_update("client-00", GlobalState(0, worker._method.initial_models()))

    plain, changed = sent(), sent(transforms=["double", "one more"])
    assert np.array_equal(changed.models["model"], 2 * plain.models["model"] + 1)
    assert changed.receipt == plain.receipt


@pytest.mark.usefixtures("named")
def test_the_rule_is_the_one_that_is_named() -> None:
    for name, expected in (("largest", [4, 6]), ("mean", [2, 5])):
        rule = build_rule(name, {"model": 2})
        rule.add(update_of(1, 6).models, 2)
        rule.add(update_of(4, 3).models, 1)
        assert rule.result()["model"].tolist() == expected


# ---- one method's part of a configuration


def test_a_method_takes_what_it_reads_and_nobodys_keys_are_left_to_be_refused() -> None:
    values = {
        "method": "fedavg",
        "fedpa": {"burn_in": 1},
        "student": {"rate": 0.1},
        "baseline": {"rate": 0.2, "network": "teacher"},
        "client": {"epoch": 3},
        "data": {"server_pool": 30, "reserved": 10},
        "server": {"distill": {"epochs": 2}},
    }
    kept = restricted(values, "fedavg")
    assert kept == {
        "method": "fedavg",
        "baseline": {"rate": 0.2, "network": "teacher"},
        "client": {"epoch": 3},
        "data": {"server_pool": 0, "reserved": 30},  # the clients' rows are those of a method with a pool
    }
    with pytest.raises(ConfigError, match=r"client\.epoch: unknown key"):
        parse_config(kept)
    distils = restricted({**values, "method": "fedbe"}, "fedbe")
    assert distils["data"] == values["data"]
    assert distils["server"] == values["server"]


def test_a_stored_baseline_of_the_first_version_has_half_of_the_teachers_rate() -> None:
    teacher = {"rate": 0.08, "rate_step": 3, "rate_gamma": 0.5}
    for own, rate in ((None, 0.04), (0.3, 0.3)):
        stored = {"method": "fedavg", "teacher": teacher, "baseline": {"network": "teacher", "rate": own}}
        baseline = parse_config(upgraded(stored, "fedavg")).values()["baseline"]
        assert (baseline["rate"], baseline["rate_step"], baseline["rate_gamma"]) == (rate, 3, 0.5)


def test_a_pool_that_nobody_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.server_pool: nobody uses these 20 rows: method fedavg"):
        parse_config({"method": "fedavg", "data": {"server_pool": 20}})


# ---- a trial of a network


class Silent(nn.Module):
    """Its answer does not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.out(x).detach()
        return answer


def test_a_network_that_cannot_learn_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not depend on its weights"):
        try_network("mine", Silent, (4,), 2)
