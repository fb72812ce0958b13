"""FedPPD and its baselines as the equations have them: plain torch, tensor by tensor, slow and easy to read.

The references of test_reference_*.py. Nothing of the package is imported here. Only randomness is shared: each function
takes the generator that the product would draw from, and draws the same numbers from it in the same order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels


# ---- networks


def shapes(first: int, second: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """conv5, pool2, conv5, dropout2d, pool2, fc, dropout, fc10 on 28×28 pixels."""
    return {
        "conv1.weight": (first, 1, 5, 5),
        "conv1.bias": (first,),
        "conv2.weight": (second, first, 5, 5),
        "conv2.bias": (second,),
        "fc.weight": (hidden, second * 16),
        "fc.bias": (hidden,),
        "out.weight": (10, hidden),
        "out.bias": (10,),
    }


TEACHER, STUDENT = shapes(10, 20, 50), shapes(20, 40, 100)


def unpack(vector: Any, of: dict[str, tuple[int, ...]]) -> Weights:
    """Named tensors of a flat vector."""
    pieces = torch.as_tensor(np.array(vector, np.float32)).split([math.prod(shape) for shape in of.values()])
    return {name: piece.reshape(of[name]).clone() for name, piece in zip(of, pieces, strict=True)}


def pack(weights: Weights) -> np.ndarray:
    return torch.cat([tensor.detach().flatten() for tensor in weights.values()]).numpy()


def logits(weights: Weights, inputs: Tensor, dropout: torch.Generator | None = None) -> Tensor:
    """A forward pass; with a generator half of the second convolution's maps and of the hidden units are dropped."""
    x = F.relu(F.max_pool2d(F.conv2d(inputs, weights["conv1.weight"], weights["conv1.bias"]), 2))
    x = F.conv2d(x, weights["conv2.weight"], weights["conv2.bias"])
    if dropout:
        x = 2 * x * torch.empty(*x.shape[:2], 1, 1).bernoulli_(0.5, generator=dropout)
    x = F.relu(F.max_pool2d(x, 2)).flatten(1)
    x = F.relu(F.linear(x, weights["fc.weight"], weights["fc.bias"]))
    if dropout:
        x = 2 * x * torch.empty(x.shape).bernoulli_(0.5, generator=dropout)
    return F.linear(x, weights["out.weight"], weights["out.bias"])


def gradients(weights: Weights, loss: Callable[[Weights], Tensor]) -> tuple[float, Weights]:
    """A loss and its gradient, tensor by tensor."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    value = loss(leaves)
    return float(value.detach()), dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def normals(weights: Weights, generator: torch.Generator) -> Weights:
    """ξ ~ N(0, I), drawn for all tensors at once as the product does."""
    drawn = torch.empty(sum(tensor.numel() for tensor in weights.values())).normal_(generator=generator)
    pieces = drawn.split([tensor.numel() for tensor in weights.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(weights.items(), pieces, strict=True)}


def assert_same(actual: np.ndarray, expected: Weights | np.ndarray, begun: np.ndarray, what: str = "") -> None:
    """Equal but for rounding, measured by how far the weights went from where they began.

    A unit whose input is 0 up to rounding may be on in one computation and off in the other, which moves some hundred
    weights by a thousandth of the way: so 97 % of all weights have to agree to a few units of float32's last place, and
    the rest together to three thousandths of the way.
    """
    wanted = expected if isinstance(expected, np.ndarray) else pack(expected)
    assert actual.shape == wanted.shape, what
    apart, way = np.abs(actual - wanted), np.linalg.norm(wanted - begun)
    assert way > 0.01 * np.linalg.norm(begun), f"{what}: the weights hardly moved, which would hide a mistake"
    assert np.quantile(apart, 0.97) < 3e-6, f"{what}: {(apart > 3e-6).mean():.1%} of the weights differ"
    assert np.linalg.norm(apart) < 3e-3 * way, f"{what}: apart by {np.linalg.norm(apart) / way:.3%} of the way"


# ---- rows


def normalised(images: np.ndarray) -> Tensor:
    return torch.tensor((images.astype(np.float64) / 255 - MEAN) / DEVIATION, dtype=torch.float32)


def crop_and_flip(images: np.ndarray, generator: torch.Generator) -> np.ndarray:
    """Zeros of four pixels around each image, a random crop of the old size, half of them mirrored."""
    top, left = torch.randint(9, (2, len(images)), generator=generator)
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    made = []
    for row, image in enumerate(padded):
        cropped = image[:, top[row] : top[row] + 28, left[row] : left[row] + 28]
        made.append(cropped[:, :, ::-1] if mirrored[row] else cropped)
    return np.stack(made)


def batches(
    images: np.ndarray, size: int, generator: torch.Generator, augment: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch in random order, in batches of about equal size."""
    order = torch.randperm(len(images), generator=generator)
    for rows in order.tensor_split(math.ceil(len(images) / size)):
        chosen = images[rows.numpy()]
        yield normalised(crop_and_flip(chosen, generator) if augment else chosen), rows


# ---- samplers of the teacher


class Chain:
    """One client's chain in one round: θ moves by `step`, epoch by epoch."""

    def __init__(self, settings: dict[str, Any], epochs: int, rows: int, rate: float) -> None:
        self.kind = settings.get("sampler", "sgld")
        self.settings, self.epochs, self.rows, self.base = settings, epochs, rows, rate
        self.temperature = settings["temperature"]
        self.precision = settings["prior_precision"]
        self.velocity: Weights = {}
        self.squares: Weights = {}
        self.preconditioner: Weights = {}

    def samples(self, epoch: int) -> bool:
        """SGLD and SGHMC sample from the first epoch; cyclical and pSGLD explore first, then sample in half of them."""
        if self.kind in ("sgld", "sghmc"):
            return True
        return epoch >= self.epochs - self.settings.get("sampling_epochs", math.ceil(self.epochs / 2))

    def rate(self, epoch: int) -> float:
        if self.kind == "cyclical":
            return self.base / 2 * (1 + math.cos(math.pi * epoch / self.epochs))
        rate = self.base
        for done in range(1, epoch + 1):
            if done % self.settings["rate_step"] == 0:
                rate *= self.settings["rate_gamma"]
        return rate

    def step(self, theta: Weights, gradient: Weights, epoch: int, generator: torch.Generator) -> Weights:
        rate = self.rate(epoch)
        temperature = self.temperature if self.samples(epoch) else 0.0
        drift = {name: gradient[name] + self.precision / self.rows * theta[name] for name in theta}
        if self.kind == "psgld" and not self.samples(epoch):
            self._explore(gradient)
        noise = normals(theta, generator) if temperature > 0 else {name: torch.zeros(()) for name in theta}
        if self.kind == "sghmc":
            friction = self.settings["friction"]
            size = math.sqrt(2 * friction * rate * temperature / self.rows)
            for name in theta:
                before = self.velocity.get(name, torch.zeros(()))
                self.velocity[name] = (1 - friction) * before - rate * drift[name] + size * noise[name]
            return {name: theta[name] + self.velocity[name] for name in theta}
        size = math.sqrt(rate * temperature / self.rows)
        scale = self.preconditioner or {name: torch.ones(()) for name in theta}
        return {
            name: theta[name] - rate / 2 * scale[name] * drift[name] + size * scale[name].sqrt() * noise[name]
            for name in theta
        }

    def _explore(self, gradient: Weights) -> None:
        """V ← d V + (1 − d) g², G = 1 / (ε + sqrt(V) / mean(sqrt(V)))."""
        decay, epsilon = self.settings["preconditioner_decay"], self.settings["preconditioner_epsilon"]
        for name, value in gradient.items():
            self.squares[name] = decay * self.squares.get(name, torch.zeros(())) + (1 - decay) * value**2
        sizes = {name: value.sqrt() for name, value in self.squares.items()}
        mean = torch.cat([value.flatten() for value in sizes.values()]).mean()
        self.preconditioner = {name: 1 / (epsilon + value / mean) for name, value in sizes.items()}


# ---- clients


def soft_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return -(targets * F.log_softmax(scores, 1)).sum(1).mean()


def log_density(theta: Weights, images: np.ndarray, labels: Tensor, precision: float) -> float:
    """log p(D|θ) + log p(θ) up to a constant, on the rows as they are, without dropout."""
    with torch.no_grad():
        likelihood = F.log_softmax(logits(theta, normalised(images)).double(), 1)[range(len(labels)), labels].sum()
        return float(likelihood - precision / 2 * sum((tensor.double() ** 2).sum() for tensor in theta.values()))


def fedppd_client(
    theta: Weights,
    w: Weights,
    images: np.ndarray,
    labels: Tensor,
    generator: torch.Generator,
    *,
    client: dict[str, Any],
    teacher: dict[str, Any],
    student: dict[str, Any],
    decay: float,
) -> tuple[Weights, Weights, dict[str, float]]:
    """θ_MAP (or the last θ), w and the metrics of a local update."""
    epochs, size, augment = client["epochs"], client["batch_size"], client.get("augment") == "crop_flip"
    chain = Chain(teacher, epochs, len(images), teacher["rate"] * decay)
    best: Weights | None = None
    best_density = -math.inf
    loss = math.nan

    def sample(inputs: Tensor, rows: Tensor) -> None:
        nonlocal theta
        _, gradient = gradients(theta, lambda own: F.cross_entropy(logits(own, inputs, generator), labels[rows]))
        theta = chain.step(theta, gradient, epoch, generator)

    def distil(inputs: Tensor) -> float:
        nonlocal w
        shown = inputs + torch.empty(inputs.numel()).normal_(0, student["input_noise"], generator=generator).view(
            inputs.shape
        )
        with torch.no_grad():
            targets = F.softmax(logits(theta, shown), 1)
        value, gradient = gradients(w, lambda own: soft_cross_entropy(logits(own, shown, generator), targets))
        rate, weight_decay = student["rate"] * decay, student["weight_decay"]
        w = {name: w[name] - rate * (gradient[name] + weight_decay * w[name]) for name in w}
        return value * len(inputs)

    for epoch in range(epochs):
        online = chain.samples(epoch) and student["distill_every"] == "iteration"
        losses = []
        for inputs, rows in batches(images, size, generator, augment):
            sample(inputs, rows)
            if online:
                losses.append(distil(inputs))
        if not chain.samples(epoch):
            continue
        if not online:
            losses = [distil(inputs) for inputs, _ in batches(images, size, generator, augment)]
        loss = sum(losses) / len(images)
        density = log_density(theta, images, labels, chain.precision)
        if density > best_density:
            best, best_density = theta, density
    metrics = {"distillation_loss": loss}
    if teacher.get("send", "map") == "map" and best is not None:
        return best, w, metrics | {"log_posterior_per_row": best_density / len(images)}
    return theta, w, metrics


def sgd_client(
    start: Weights,
    images: np.ndarray,
    labels: Tensor,
    generator: torch.Generator,
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    momentum: float,
    weight_decay: float,
    augment: bool = False,
    rate_step: int = 2,
    rate_gamma: float = 0.85,
) -> tuple[list[list[Weights]], list[float]]:
    """Every iterate of every epoch, and each epoch's mean loss: v ← μ v + ∇ + wd·w, w ← w − rate·v, v = 0 at first."""
    weights = start
    velocity = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    path: list[list[Weights]] = []
    losses = []
    for epoch in range(epochs):
        iterates, total = [], 0.0
        for inputs, rows in batches(images, batch_size, generator, augment):
            value, gradient = gradients(
                weights,
                lambda own, inputs=inputs, rows=rows: F.cross_entropy(logits(own, inputs, generator), labels[rows]),
            )
            for name in weights:
                velocity[name] = momentum * velocity[name] + gradient[name] + weight_decay * weights[name]
            now = rate * rate_gamma ** (epoch // rate_step)
            weights = {name: weights[name] - now * velocity[name] for name in weights}
            iterates.append(weights)
            total += value * len(rows)
        path.append(iterates)
        losses.append(total / len(images))
    return path, losses


def posterior_delta(theta: np.ndarray, samples: Sequence[np.ndarray], rho: float) -> np.ndarray:
    """Σ̂⁻¹(x̄ − θ) with Σ̂ = ρ_n I + (1 − ρ_n) S, by Woodbury's identity in the space of the samples."""
    stacked = np.stack(samples).astype(np.float64)
    n = len(stacked)
    shrink = 1 / (1 + (n - 1) * rho)
    away = stacked.mean(0) - theta
    if shrink == 1:
        return away
    deviations = (stacked - stacked.mean(0)).T
    inner = (n - 1) * shrink / (1 - shrink) * np.eye(n) + deviations.T @ deviations
    return (away - deviations @ np.linalg.solve(inner, deviations.T @ away)) / shrink


# ---- server


def average(clients: Sequence[Weights], rows: Sequence[int]) -> Weights:
    """Σ n_k w_k / Σ n_k."""
    return {
        name: sum(n * own[name].double() for n, own in zip(rows, clients, strict=True)).div(sum(rows)).float()
        for name in clients[0]
    }


def gaussian(
    start: Weights, clients: Sequence[Weights], settings: dict[str, Any], generator: torch.Generator
) -> list[Weights]:
    """M models: per tensor, with δ_i = (w_i − w_start)/‖·‖, w_start + s·mean‖Δ‖·(m + spread·sqrt(v)·ξ)."""
    drawn: list[Weights] = [{} for _ in range(settings["samples"])]
    for name, origin in start.items():
        deltas = [(own[name] - origin).double() for own in clients]
        lengths = [delta.norm() for delta in deltas]
        directions = torch.stack([delta / length for delta, length in zip(deltas, lengths, strict=True)])
        m = directions.mean(0)
        v = ((directions**2).mean(0) - m**2).clamp(min=settings["min_variance"])
        for sample in drawn:
            xi = torch.randn(origin.numel(), generator=generator, dtype=torch.float64).view(origin.shape)
            step = settings["scale"] * sum(lengths) / len(lengths) * (m + settings["spread"] * v.sqrt() * xi)
            sample[name] = (origin + step).float()
    return drawn


def distillation(
    start: Weights,
    clients: Sequence[Weights],
    rows: Sequence[int],
    pool: np.ndarray,
    rate: float,
    settings: dict[str, Any],
    drawn: torch.Generator,
    stream: torch.Generator,
) -> Weights:
    """Gaussian, ensemble of samples, average and clients, pseudo-labels, SGD with momentum from the average, SWA."""
    w = average(clients, rows)
    ensemble = [*gaussian(start, clients, settings, drawn), w, *clients]
    with torch.no_grad():
        each = [F.softmax(logits(member, normalised(pool)), 1) for member in ensemble]
    labels = (sum(each) / len(each)) ** (1 / settings["sharpen"])
    labels = labels / labels.sum(1, keepdim=True)
    steps = settings["epochs"] * math.ceil(len(pool) / settings["batch_size"])
    first = max(1, min(settings["swa_start"], steps // 2))
    velocity = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
    averaged: list[Weights] = []
    step = 0
    for _ in range(settings["epochs"]):
        for inputs, shown in batches(pool, settings["batch_size"], stream):
            _, gradient = gradients(
                w,
                lambda own, inputs=inputs, shown=shown: soft_cross_entropy(logits(own, inputs, stream), labels[shown]),
            )
            divisor = 10 if settings["divide_by_classes"] else 1
            for name in w:
                decayed = gradient[name] / divisor + settings["weight_decay"] * w[name]
                velocity[name] = settings["momentum"] * velocity[name] + decayed
            w = {name: w[name] - rate * velocity[name] for name in w}
            step += 1
            if step in range(first, steps + 1, settings["swa_every"]):
                averaged.append(w)
    return {name: torch.stack([own[name].double() for own in averaged]).mean(0).float() for name in w}
