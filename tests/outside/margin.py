"""A score from outside: how near the second class comes to the first, between 0 and 1."""

import numpy as np

import fedppd_ray as fp


def margin(log_probabilities: np.ndarray) -> np.ndarray:
    two = np.sort(np.exp(log_probabilities), axis=1)[:, -2:]
    return 1 - (two[:, 1] - two[:, 0])


fp.register_score(fp.Score("margin", margin, limit=lambda _classes: 1.0))
