"""The likelihood of a client's labels, by its own class shares: logit adjustment (Menon et al., ICLR 2021).

With π_k(c) = (n_kc + 1)/(N_k + C), the share of class c among a client's N_k rows (one row of every class more, so that
an absent class has no share of zero), and strength τ

    log p_k(y | x, θ) = f_y + τ log π_k(y) − log Σ_c exp(f_c + τ log π_k(c))

What the client's skew explains, the network need not learn: its plain softmax is a prediction for balanced classes.

Or by class weights: with C_k classes among the client's N_k rows, a row of class c counts w_c = N_k/(C_k n_kc) times,

    log p_k(D | θ) = Σ_i w_{y_i} log p(y_i | x_i, θ)

so that the classes that it holds count alike, and all rows together as many as there are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_shares(labels: Tensor, classes: int) -> Tensor:
    """log π_k, from a client's labels."""
    counts = torch.bincount(labels, minlength=classes).double()
    return ((counts + 1) / (len(labels) + classes)).log()


def label_shift(labels: Tensor, classes: int, strength: float) -> Tensor | None:
    """τ log π_k, what is added to the logits; None for τ = 0, which adds nothing."""
    return None if strength == 0 else (strength * log_shares(labels, classes)).float()


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """w_c of a client's labels; 0 of a class that it does not hold."""
    counts = torch.bincount(labels, minlength=classes).double()
    held = int((counts > 0).sum())
    return torch.where(counts > 0, len(labels) / (held * counts.clamp(min=1)), 0.0).float()


def label_loss(logits: Tensor, labels: Tensor, shift: Tensor | None, weights: Tensor | None) -> Tensor:
    """The batch's mean of −w_y log p_k(y | x): an unbiased estimate of the client's, whichever classes are in it."""
    if weights is None:
        return F.cross_entropy(shifted(logits, shift), labels)
    return (weights[labels] * F.cross_entropy(shifted(logits, shift), labels, reduction="none")).mean()


def shifted(logits: Tensor, shift: Tensor | None) -> Tensor:
    """Logits of p_k(y | x): f + τ log π_k."""
    return logits if shift is None else logits + shift
