"""The student's loss and its step (Bayesian Dark Knowledge, Balan et al., NeurIPS 2015).

The loss is the soft-target cross-entropy against the teacher's predictions. A batch may add to it: its labels, and
outliers made of it. Then the student is no longer a distilled predictive distribution alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedppd_ray.bayes.likelihood import shifted
from fedppd_ray.bayes.outliers import OutlierTerm, logits_and_penalty
from fedppd_ray.models.flat import FlatModel


@dataclass(frozen=True)
class LabelTerm:
    """λ and y; `targets` has one line a row (one-hot, or mixed), `shift` is τ log π_k."""

    weight: float
    targets: Tensor
    shift: Tensor | None = None


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """− 1/M Σ_x Σ_c target(c|x) log softmax(logits)_c: the negative of the paper's student objective."""
    return -(targets * torch.log_softmax(logits, dim=1)).sum() / len(logits)


def student_loss(logits: Tensor, targets: Tensor, labels: LabelTerm | None) -> Tensor:
    """(1 − λ) CE(p_T(x), softmax f(x)) + λ CE(y, softmax(f(x) + τ log π_k)); without labels λ = 0."""
    distilled = soft_cross_entropy(logits, targets)
    if labels is None:
        return distilled
    return (1 - labels.weight) * distilled + labels.weight * soft_cross_entropy(
        shifted(logits, labels.shift), labels.targets
    )


def student_step(
    student: FlatModel,
    inputs: Tensor,
    targets: Tensor,
    rate: float,
    weight_decay: float,
    *,
    labels: LabelTerm | None = None,
    outliers: OutlierTerm | None = None,
) -> float:
    """One plain SGD step `w ← w − β (∇ L + wd · w)`; returns the loss L before it.

    L is `student_loss`, plus λ_o CE(uniform, softmax f(x̃)) on outliers x̃ made of the inputs.
    """
    logits, penalty = logits_and_penalty(student.module, inputs, outliers)
    loss = student_loss(logits, targets, labels)
    if penalty is not None:
        loss = loss + penalty
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
