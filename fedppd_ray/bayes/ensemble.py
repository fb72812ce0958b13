"""Server_Update "Distill": Gaussian over client models, ensemble pseudo-labels, SWA.

The scheme of FedBE (Chen & Chao, ICLR 2021), which FedPPD applies to teachers and students alike.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedppd_ray.bayes.distill import soft_cross_entropy
from fedppd_ray.data.rows import Shard
from fedppd_ray.models.flat import FlatModel, Layout, Vector
from fedppd_ray.models.networks import seed_dropout

_PREDICT_BATCH = 500


@dataclass(frozen=True)
class Distillation:
    """How the server distils; `methods.settings.DistillConfig` says what each number means."""

    rate: float
    epochs: int
    batch_size: int
    samples: int
    spread: float
    scale: float
    min_variance: float
    sharpen: float
    pooling: Literal["mixture", "geometric"]
    power: float
    divide_by_classes: bool
    momentum: float
    weight_decay: float
    swa_start: int
    swa_every: int


def _never() -> bool:
    return False


def _check(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise CancelledError("told to stop distilling")


def gaussian_samples(
    start: Vector, clients: list[Vector], layout: Layout, plan: Distillation, generator: torch.Generator
) -> list[Vector]:
    """M models from a Gaussian fitted to the clients, tensor by tensor, on normalised deltas.

    With Δ_i = w_i − w_start and δ_i = Δ_i/‖Δ_i‖ of one tensor: mean m, variance v = max(E[δ²] − m², v_min) and
    sample = w_start + scale · mean‖Δ‖ · (m + spread · sqrt(v) ξ). Buffers take the clients' mean: a running
    variance must not become negative.
    """
    stacked = np.stack(clients)
    samples = [start.copy() for _ in range(plan.samples)]
    for slot in layout.slots:
        part = slice(slot.start, slot.stop)
        if slot.start >= layout.parameters:
            for sample in samples:
                sample[part] = stacked[:, part].mean(axis=0)
            continue
        deltas = stacked[:, part].astype(np.float64) - start[part]
        lengths = np.linalg.norm(deltas, axis=1)
        directions = deltas / np.maximum(lengths, np.finfo(np.float64).tiny)[:, None]
        mean = directions.mean(axis=0)
        deviation = np.sqrt(np.maximum((directions**2).mean(axis=0) - mean**2, plan.min_variance))
        for sample in samples:
            noise = torch.randn(slot.stop - slot.start, generator=generator, dtype=torch.float64).numpy()
            step = plan.scale * lengths.mean() * (mean + plan.spread * deviation * noise)
            sample[part] = start[part] + step
    return samples


def pseudo_labels(
    model: FlatModel, members: list[Vector], pool: Shard, sharpen: float, cancelled: Callable[[], bool] = _never
) -> Tensor:
    """Mean probability of the ensemble on every row of the pool, sharpened to p^(1/sharpen)."""
    mean = _ensemble_mean(model, members, pool, lambda logits: torch.softmax(logits, 1), cancelled)
    # p^(1/s) renormalised, by way of logarithms: the power itself may underflow to 0/0.
    return mean if sharpen == 1.0 else torch.softmax(mean.log() / sharpen, 1)


def geometric_labels(
    model: FlatModel, members: list[Vector], pool: Shard, power: float, cancelled: Callable[[], bool] = _never
) -> Tensor:
    """p̂ ∝ exp(β mean_i log p_i) on every row of the pool, with β = `power`.

    A mixture of clients with skewed classes is less sure than it is right; their geometric mean is not.
    """
    mean = _ensemble_mean(model, members, pool, lambda logits: torch.log_softmax(logits, 1), cancelled)
    return torch.softmax(power * mean, 1)


@torch.no_grad()
def _ensemble_mean(
    model: FlatModel,
    members: list[Vector],
    pool: Shard,
    of: Callable[[Tensor], Tensor],
    cancelled: Callable[[], bool],
) -> Tensor:
    """The members' mean of a function of their logits, on every row."""
    if not members:
        raise ValueError("an ensemble without members")
    model.module.eval()
    means = []
    for part in torch.arange(len(pool), device=pool.device).split(_PREDICT_BATCH):
        _check(cancelled)
        inputs = pool.inputs(part)
        values = []
        for member in members:  # all on one batch: to load a model costs far less than to make the inputs again
            model.load(member)
            values.append(of(model.module(inputs)))
        means.append(torch.stack(values).mean(0))
    return torch.cat(means)


class RunningAverage:
    """SWA: the plain mean of the weights it is shown (Izmailov et al., UAI 2018)."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.mean = torch.zeros(size, device=device, dtype=torch.float64)
        self.count = 0

    def add(self, vector: Tensor) -> None:
        self.count += 1
        self.mean.add_((vector - self.mean) / self.count)


def distil_ensemble(
    model: FlatModel,
    start: Vector,
    targets: Tensor,
    pool: Shard,
    plan: Distillation,
    generator: torch.Generator,
    cancelled: Callable[[], bool] = _never,
) -> Vector:
    """Train `start` on the pseudo-labels by SGD with momentum and return the SWA average of its path."""
    model.load(start)
    model.module.train()
    seed_dropout(model.module, generator)
    steps = plan.epochs * -(-len(pool) // plan.batch_size)
    # A short run must average something too: never start later than half-way, and steps count from 1.
    first = max(1, min(plan.swa_start, steps // 2))
    average = RunningAverage(model.layout.size, model.vector.device)
    velocity = torch.zeros_like(model.weights)
    step = 0
    for _ in range(plan.epochs):
        for inputs, rows in pool.batches(plan.batch_size, generator):
            _check(cancelled)
            loss = soft_cross_entropy(model.module(inputs), targets[rows])
            if plan.divide_by_classes:
                loss = loss / targets.shape[1]
            gradient = model.backward(loss)
            with torch.no_grad():
                velocity.mul_(plan.momentum).add_(gradient).add_(model.weights, alpha=plan.weight_decay)
                model.weights.add_(velocity, alpha=-plan.rate)
            step += 1
            if step >= first and (step - first) % plan.swa_every == 0:
                average.add(model.vector)
    with torch.no_grad():
        model.vector.copy_(average.mean)
    refresh_batch_norm(model, pool, plan.batch_size, generator)
    return model.export()


@torch.no_grad()
def refresh_batch_norm(model: FlatModel, pool: Shard, batch_size: int, generator: torch.Generator) -> None:
    """Re-estimate running statistics for averaged weights: they belong to no network that was ever run."""
    norms = [part for part in model.module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    model.module.train()
    for inputs, _ in pool.batches(batch_size, generator):
        model.module(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def server_distillation(
    model: FlatModel,
    start: Vector,
    average: Vector,
    clients: list[Vector],
    pool: Shard,
    plan: Distillation,
    *,
    drawn: torch.Generator,
    stream: torch.Generator,
    cancelled: Callable[[], bool] = _never,
) -> Vector:
    """Gaussian → M samples; ensemble of samples, average and clients → pseudo-labels; SWA from the average.

    `start` is what the clients started from; `drawn` draws the samples, `stream` drives the training. Raises
    CancelledError soon after `cancelled()`.
    """
    samples = gaussian_samples(start, clients, model.layout, plan, drawn)
    members = [*samples, average, *clients]
    if plan.pooling == "geometric":
        targets = geometric_labels(model, members, pool, plan.power, cancelled)
    else:
        targets = pseudo_labels(model, members, pool, plan.sharpen, cancelled)
    return distil_ensemble(model, average, targets, pool, plan, stream, cancelled)
