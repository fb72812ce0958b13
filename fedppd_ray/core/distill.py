"""Soft-target cross-entropy and the student's step (Bayesian Dark Knowledge, Balan et al., NeurIPS 2015)."""

import torch
from torch import Tensor

from fedppd_ray.models.flat import FlatModel


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """− 1/M Σ_x Σ_c target(c|x) log softmax(logits)_c: the negative of the paper's student objective."""
    return -(targets * torch.log_softmax(logits, dim=1)).sum() / len(logits)


def student_step(student: FlatModel, inputs: Tensor, targets: Tensor, rate: float, weight_decay: float) -> float:
    """One plain SGD step `w ← w − β (∇ soft cross-entropy + wd · w)`; returns the loss before it."""
    loss = soft_cross_entropy(student.module(inputs), targets)
    gradient = student.backward(loss)
    with torch.no_grad():
        student.weights.mul_(1 - rate * weight_decay).add_(gradient, alpha=-rate)
    return float(loss.detach())


def noisy(inputs: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """B': training inputs plus Gaussian noise."""
    if std == 0:
        return inputs
    # Drawn in memory order, then seen with the strides of the inputs: into a tensor whose channels come last, torch
    # draws one number at a time, eighteen times slower. Added in place, which keeps those strides for one channel too.
    drawn = torch.empty(inputs.numel(), device=inputs.device, dtype=inputs.dtype).normal_(0, std, generator=generator)
    return drawn.as_strided(inputs.shape, inputs.stride()).add_(inputs)
