"""Server_Update "Distill": Gaussian over client models, ensemble pseudo-labels, SWA.

The scheme of FedBE (Chen & Chao, ICLR 2021), which FedPPD applies to teachers and students alike.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import torch
from torch import Tensor

from fedppd_ray.config import DistillConfig
from fedppd_ray.core.distill import soft_cross_entropy
from fedppd_ray.data.batches import Shard
from fedppd_ray.models.flat import FlatModel, Layout, Vector
from fedppd_ray.models.networks import seed_dropout

_PREDICT_BATCH = 500


def _never() -> bool:
    return False


def _check(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise CancelledError("told to stop distilling")


def gaussian_samples(
    start: Vector, clients: list[Vector], layout: Layout, config: DistillConfig, generator: torch.Generator
) -> list[Vector]:
    """M models from a Gaussian fitted to the clients, tensor by tensor, on normalised deltas.

    With Δ_i = w_i − w_start and δ_i = Δ_i/‖Δ_i‖ of one tensor: mean m, variance v = max(E[δ²] − m², v_min) and
    sample = w_start + scale · mean‖Δ‖ · (m + spread · sqrt(v) ξ). Buffers take the clients' mean: a running
    variance must not become negative.
    """
    stacked = np.stack(clients)
    samples = [start.copy() for _ in range(config.samples)]
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
        deviation = np.sqrt(np.maximum((directions**2).mean(axis=0) - mean**2, config.min_variance))
        for sample in samples:
            noise = torch.randn(slot.stop - slot.start, generator=generator, dtype=torch.float64).numpy()
            step = config.scale * lengths.mean() * (mean + config.spread * deviation * noise)
            sample[part] = start[part] + step
    return samples


@torch.no_grad()
def pseudo_labels(
    model: FlatModel, members: list[Vector], pool: Shard, sharpen: float, cancelled: Callable[[], bool] = _never
) -> Tensor:
    """Mean probability of the ensemble on every row of the pool, sharpened to p^(1/sharpen)."""
    if not members:
        raise ValueError("an ensemble without members")
    model.module.eval()
    parts = torch.arange(len(pool), device=pool.device).split(_PREDICT_BATCH)
    means = []
    for part in parts:
        _check(cancelled)
        means.append(_mean_probability(model, members, pool.inputs(part)))
    mean = torch.cat(means)
    # p^(1/s) renormalised, by way of logarithms: the power itself may underflow to 0/0.
    return mean if sharpen == 1.0 else torch.softmax(mean.log() / sharpen, 1)


def _mean_probability(model: FlatModel, members: list[Vector], inputs: Tensor) -> Tensor:
    """All members on one batch: to load a model costs far less than to make the inputs again."""

    def probabilities(member: Vector) -> Tensor:
        model.load(member)
        return torch.softmax(model.module(inputs), 1)

    return torch.stack([probabilities(member) for member in members]).mean(0)


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
    rate: float,
    config: DistillConfig,
    generator: torch.Generator,
    cancelled: Callable[[], bool] = _never,
) -> Vector:
    """Train `start` on the pseudo-labels by SGD with momentum and return the SWA average of its path."""
    model.load(start)
    model.module.train()
    seed_dropout(model.module, generator)
    steps = config.epochs * -(-len(pool) // config.batch_size)
    # A short run must average something too: never start later than half-way, and steps count from 1.
    first = max(1, min(config.swa_start, steps // 2))
    average = RunningAverage(model.layout.size, model.vector.device)
    velocity = torch.zeros_like(model.weights)
    step = 0
    for _ in range(config.epochs):
        for inputs, rows in pool.batches(config.batch_size, generator):
            _check(cancelled)
            loss = soft_cross_entropy(model.module(inputs), targets[rows])
            if config.divide_by_classes:
                loss = loss / targets.shape[1]
            gradient = model.backward(loss)
            with torch.no_grad():
                velocity.mul_(config.momentum).add_(gradient).add_(model.weights, alpha=config.weight_decay)
                model.weights.add_(velocity, alpha=-rate)
            step += 1
            if step >= first and (step - first) % config.swa_every == 0:
                average.add(model.vector)
    with torch.no_grad():
        model.vector.copy_(average.mean)
    refresh_batch_norm(model, pool, config.batch_size, generator)
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
    rate: float,
    config: DistillConfig,
    *,
    drawn: torch.Generator,
    stream: torch.Generator,
    cancelled: Callable[[], bool] = _never,
) -> Vector:
    """Gaussian → M samples; ensemble of samples, average and clients → pseudo-labels; SWA from the average.

    `start` is what the clients started from; `drawn` draws the samples, `stream` drives the training. Raises
    CancelledError soon after `cancelled()`.
    """
    samples = gaussian_samples(start, clients, model.layout, config, drawn)
    targets = pseudo_labels(model, [*samples, average, *clients], pool, config.sharpen, cancelled)
    return distil_ensemble(model, average, targets, pool, rate, config, stream, cancelled)
