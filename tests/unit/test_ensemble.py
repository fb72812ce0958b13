"""Server_Update "Distill", piece by piece against torch's own tools."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from fedppd_ray.bayes.ensemble import Distillation, RunningAverage, distil_ensemble, pseudo_labels, refresh_batch_norm
from fedppd_ray.data.rows import Shard
from fedppd_ray.methods.settings import DistillConfig
from fedppd_ray.models.flat import FlatModel, Vector
from fedppd_ray.models.networks import Dropout
from fedppd_ray.seeding import generator_for

CLASSES = 4


def at_rate(settings: DistillConfig, rate: float) -> Distillation:
    return settings.model_copy(update={"teacher_rate": rate}).plan("teacher")


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


def normalised() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)]
    return nn.Sequential(*layers)


def flat(build: Callable[[], nn.Module] = linear) -> FlatModel:
    model = FlatModel(build())
    generator = generator_for(0, "weights")
    with torch.no_grad():
        model.weights.normal_(0, 0.2, generator=generator)
    return model


def members(model: FlatModel, count: int) -> list[Vector]:
    generator = np.random.default_rng(0)
    return [generator.normal(0, 0.3, model.layout.size).astype(np.float32) for _ in range(count)]


def targets_for(pool: Shard) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(len(pool), CLASSES, generator=generator_for(0, "targets")), 1)


def probabilities(model: FlatModel, pool: Shard) -> torch.Tensor:
    model.module.eval()
    with torch.no_grad():
        return torch.softmax(model.module(pool.inputs(torch.arange(len(pool)))), 1)


# ---- pseudo-labels


def test_pseudo_labels_are_the_mean_probability_of_the_members(pool: Shard) -> None:
    model = flat()
    vectors = members(model, 3)
    each = []
    for vector in vectors:
        model.load(vector)
        each.append(probabilities(model, pool).double())
    expected = torch.stack(each).mean(0)
    torch.testing.assert_close(pseudo_labels(model, vectors, pool, 1.0).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sharpen", [0.5, 2.0])
def test_sharpening_is_a_power_renormalised(pool: Shard, sharpen: float) -> None:
    model = flat()
    vectors = members(model, 3)
    powered = pseudo_labels(model, vectors, pool, 1.0).double() ** (1 / sharpen)
    expected = powered / powered.sum(1, keepdim=True)
    torch.testing.assert_close(pseudo_labels(model, vectors, pool, sharpen).double(), expected, rtol=0, atol=1e-6)


def test_extreme_sharpening_gives_certain_labels_and_no_nan(pool: Shard) -> None:
    model = flat()
    vectors = members(model, 3)
    labels = pseudo_labels(model, vectors, pool, 0.001)
    assert torch.isfinite(labels).all()
    assert torch.equal(labels.argmax(1), pseudo_labels(model, vectors, pool, 1.0).argmax(1))


def test_pseudo_labels_are_made_without_dropout(pool: Shard) -> None:
    model = flat(lambda: nn.Sequential(nn.Flatten(), Dropout(), nn.Linear(36, CLASSES)))
    model.module.train()
    vectors = members(model, 2)
    assert torch.equal(pseudo_labels(model, vectors, pool, 1.0), pseudo_labels(model, vectors, pool, 1.0))


def test_an_ensemble_without_members_is_refused(pool: Shard) -> None:
    with pytest.raises(ValueError, match="without members"):
        pseudo_labels(flat(), [], pool, 1.0)


# ---- SWA


def test_the_running_average_is_torchs_averaged_model() -> None:
    module = nn.Linear(5, 3)
    averaged = AveragedModel(module)
    average = RunningAverage(18, torch.device("cpu"))
    generator = generator_for(0, "path")
    for _ in range(7):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=generator)
        averaged.update_parameters(module)
        average.add(torch.cat([p.detach().flatten() for p in module.parameters()]))
    expected = torch.cat([p.detach().flatten() for p in averaged.module.parameters()])
    torch.testing.assert_close(average.mean.float(), expected)
    assert average.count == 7


def reference_swa(
    model: FlatModel, targets: torch.Tensor, pool: Shard, rate: float, config: DistillConfig
) -> np.ndarray:
    """The same by torch.optim.SGD and AveragedModel, on the same batches."""
    module = copy.deepcopy(nn.Sequential(*model.module))
    optimizer = torch.optim.SGD(
        module.parameters(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    averaged = AveragedModel(module)
    generator = generator_for(0, "distil")
    batches = [batch for _ in range(config.epochs) for batch in pool.batches(config.batch_size, generator)]
    first = max(1, min(config.swa_start, len(batches) // 2))
    for step, (inputs, rows) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets[rows])
        (loss / CLASSES if config.divide_by_classes else loss).backward()
        optimizer.step()
        if step in range(first, len(batches) + 1, config.swa_every):
            averaged.update_parameters(module)
    assert int(averaged.n_averaged) > 0
    return torch.cat([p.detach().flatten() for p in averaged.module.parameters()]).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1, "batch_size": 64},  # a single step
        {"epochs": 1, "batch_size": 20},  # two steps
        {"epochs": 4, "batch_size": 10, "swa_start": 0},
        {"epochs": 4, "batch_size": 10, "swa_start": 5, "swa_every": 3},
        {"epochs": 5, "batch_size": 10},  # authors' start at 500, brought forward to half-way
        {"epochs": 3, "batch_size": 10, "divide_by_classes": True, "weight_decay": 0.1, "momentum": 0.5},
    ],
)
def test_distillation_is_sgd_with_swa(pool: Shard, settings: dict[str, float]) -> None:
    config, model, targets = DistillConfig(**settings), flat(), targets_for(pool)
    expected = reference_swa(model, targets, pool, 0.05, config)
    got = distil_ensemble(model, model.export(), targets, pool, at_rate(config, 0.05), generator_for(0, "distil"))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_distillation_brings_the_model_nearer_to_its_targets(pool: Shard) -> None:
    model, targets = flat(), targets_for(pool)
    start = model.export()

    def divergence() -> float:
        return float((targets * (targets.log() - probabilities(model, pool).log())).sum(1).mean())

    before = divergence()
    config = DistillConfig(epochs=20, batch_size=10, swa_every=5)
    model.load(distil_ensemble(model, start, targets, pool, at_rate(config, 0.01), generator_for(0, "distil")))
    assert divergence() < 0.5 * before


def test_distillation_leaves_its_start_alone(pool: Shard) -> None:
    model = flat()
    start = model.export()
    start.setflags(write=False)
    kept = start.copy()
    config = DistillConfig(epochs=1, batch_size=10)
    distil_ensemble(model, start, targets_for(pool), pool, at_rate(config, 0.1), generator_for(0, "distil"))
    assert np.array_equal(start, kept)


# ---- batch normalisation


def test_running_statistics_are_re_estimated_as_torchs_update_bn_does(pool: Shard) -> None:
    model = flat(normalised)
    reference = copy.deepcopy(nn.Sequential(*model.module))
    batches = [(inputs,) for inputs, _ in pool.batches(10, generator_for(0, "bn"))]
    update_bn(batches, reference)
    refresh_batch_norm(model, pool, 10, generator_for(0, "bn"))
    norm = model.module[1]
    torch.testing.assert_close(norm.running_mean, reference[1].running_mean)
    torch.testing.assert_close(norm.running_var, reference[1].running_var)
    assert norm.momentum == 0.1
    named = model.layout.unpack(model.export())
    np.testing.assert_allclose(named["1.running_mean"], reference[1].running_mean.numpy(), rtol=1e-6)


def test_distillation_returns_statistics_that_belong_to_the_averaged_weights(pool: Shard) -> None:
    model = flat(normalised)
    config = DistillConfig(epochs=4, batch_size=37, swa_every=1)
    result = distil_ensemble(
        model, model.export(), targets_for(pool), pool, at_rate(config, 0.05), generator_for(0, "distil")
    )
    model.load(result)
    outputs = model.module[0](pool.inputs(torch.arange(len(pool))))
    torch.testing.assert_close(model.module[1].running_mean, outputs.mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.module[1].running_var, outputs.var((0, 2, 3)).detach(), rtol=1e-3, atol=1e-4)
