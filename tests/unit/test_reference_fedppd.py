"""A client's update in FedPPD equals the equations, tensor by tensor, on the same random draws (naive.py)."""

from collections.abc import Callable
from typing import Any

import naive
import numpy as np
import pytest
import torch

from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import Holdings
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.seeding import generator_for
from fedppd_ray.workers.client import ClientWorker

Tiny = Callable[..., Config]
ROLES = {"teacher": naive.TEACHER, "student": naive.STUDENT}
CLIENT, ROUND = "client-01", 3

# Every number that the update reads, given to the product and to the reference alike. Rates, temperature and noise are
# far above the presets': a term that is missing or doubled moves a weight by far more than rounding does.
BASE: dict[str, dict[str, Any]] = {
    "client": {"epochs": 3, "batch_size": 9, "rate_decay": 0.9, "augment": "crop_flip"},
    "teacher": {
        "sampler": "sgld",
        "rate": 0.05,
        "rate_step": 2,
        "rate_gamma": 0.7,
        "temperature": 0.05,
        "prior_precision": 1.5,
        "send": "last",
    },
    "student": {"rate": 0.1, "weight_decay": 0.02, "input_noise": 0.4, "distill_every": "epoch"},
}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "per epoch, the last sample": {},
    "per epoch, the sample of highest density": {"teacher": {"send": "map", "temperature": 0.4}},
    "per iteration, the last sample": {"student": {"distill_every": "iteration"}},
    "per iteration, the sample of highest density": {
        "student": {"distill_every": "iteration"},
        "teacher": {"send": "map", "temperature": 0.4},
    },
    "rows as they are": {"client": {"augment": "none"}},
    "without temperature": {"teacher": {"temperature": 0.0}},
    "cyclical": {"teacher": {"sampler": "cyclical", "sampling_epochs": 1}},
    "cyclical, per iteration": {
        "teacher": {"sampler": "cyclical", "send": "map"},
        "student": {"distill_every": "iteration"},
    },
    "sghmc": {"teacher": {"sampler": "sghmc", "rate": 0.01, "friction": 0.3}},
    "psgld": {"teacher": {"sampler": "psgld", "preconditioner_decay": 0.8, "preconditioner_epsilon": 0.5}},
}


def settings_of(case: str) -> dict[str, dict[str, Any]]:
    return {section: {**BASE[section], **CASES[case].get(section, {})} for section in BASE}


@pytest.fixture(scope="module")
def start(tiny: Tiny) -> GlobalState:
    """A teacher sharp enough to have something to teach, two rounds into a run."""
    models = build_method(tiny()).initial_models()
    return GlobalState(ROUND - 1, {"teacher": models["teacher"] * np.float32(1.4), "student": models["student"]})


def reference(config: Config, settings: dict[str, dict[str, Any]], start: GlobalState) -> Any:
    held = Holdings(config, [CLIENT]).of(CLIENT)
    return naive.fedppd_client(
        naive.unpack(start.models["teacher"], naive.TEACHER),
        naive.unpack(start.models["student"], naive.STUDENT),
        np.asarray(held.images),
        torch.tensor(np.asarray(held.labels)),
        generator_for(config.seed, "local", ROUND, CLIENT),
        **settings,
        decay=settings["client"]["rate_decay"] ** (ROUND - 1),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_clients_update_is_what_the_equations_say(case: str, tiny: Tiny, start: GlobalState) -> None:
    settings = settings_of(case)
    config = tiny(**settings)
    worker = ClientWorker(config, [CLIENT])
    worker.local_update(CLIENT, start)  # nothing of an earlier update may be left
    update = worker.local_update(CLIENT, start)
    *expected, metrics = reference(config, settings, start)
    for role, wanted in zip(ROLES, expected, strict=True):
        naive.assert_same(update.models[role], wanted, start.models[role], role)
    assert (update.receipt.client, update.receipt.round, update.receipt.rows) == (CLIENT, ROUND, 24)
    assert update.receipt.metrics == pytest.approx(metrics, rel=1e-4)


def test_the_sample_of_highest_density_is_another_than_the_last_here(tiny: Tiny, start: GlobalState) -> None:
    """Else the cases above could not tell `map` from `last`."""
    for case in ("per epoch, the sample of highest density", "per iteration, the sample of highest density"):
        settings = settings_of(case)
        last = {**settings, "teacher": {**settings["teacher"], "send": "last"}}
        config = tiny(**settings)
        (chosen, *_), (final, *_) = (reference(config, one, start) for one in (settings, last))
        assert np.abs(naive.pack(chosen) - naive.pack(final)).max() > 0.01


class CountingShard(ImageShard):
    """Counts the batches that are made of it."""

    made = 0

    def inputs(self, rows: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        self.made += 1
        return super().inputs(rows, generator)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 8])
def test_a_cancelled_client_makes_no_further_batch(every: str, batch: int, tiny: Tiny) -> None:
    """Told to stop during any batch, sampling or distilling (an epoch has three)."""
    config = tiny(client={"epochs": 3, "batch_size": 9}, student={"distill_every": every}, teacher={"send": "last"})
    held = Holdings(config, [CLIENT]).of(CLIENT)
    shard = CountingShard(held.images, held.labels, config.dataset)
    method = build_method(config)
    with pytest.raises(LocalUpdateCancelled):
        method.local_update(CLIENT, GlobalState(0, method.initial_models()), shard, lambda: shard.made >= batch)
    assert shard.made == batch
