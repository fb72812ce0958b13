"""The likelihood of a client's labels, by its own class shares: logit adjustment (Menon et al., ICLR 2021).

With π_k(c) = (n_kc + 1)/(N_k + C), the share of class c among a client's N_k rows (one row of every class more, so that
an absent class has no share of zero), and strength τ

    log p_k(y | x, θ) = f_y + τ log π_k(y) − log Σ_c exp(f_c + τ log π_k(c))

What the client's skew explains, the network need not learn: its plain softmax is a prediction for balanced classes.
"""

import torch
from torch import Tensor


def log_shares(labels: Tensor, classes: int) -> Tensor:
    """log π_k, from a client's labels."""
    counts = torch.bincount(labels, minlength=classes).double()
    return ((counts + 1) / (len(labels) + classes)).log()


def label_shift(labels: Tensor, classes: int, strength: float) -> Tensor | None:
    """τ log π_k, what is added to the logits; None for τ = 0, which adds nothing."""
    return None if strength == 0 else (strength * log_shares(labels, classes)).float()


def shifted(logits: Tensor, shift: Tensor | None) -> Tensor:
    """Logits of p_k(y | x): f + τ log π_k."""
    return logits if shift is None else logits + shift
