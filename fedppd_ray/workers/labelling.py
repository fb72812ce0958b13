"""Federated active learning on a client: which of its rows are labelled after some acquisitions.

The labelled rows are a function of the client's rows, the seed and the global models that ranked its pool before.
So no row number ever leaves the client, nothing of it is kept on disk, and a client whose process dies works its
labelled rows out again.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.schema import ActiveConfig
from fedppd_ray.seeding import numpy_generator_for

Indices = NDArray[np.int64]
Uncertainty = Callable[[Indices], NDArray[np.float64]]  # predictive entropy of these rows under one global model


def labelled_rows(active: ActiveConfig, rows: int, seed: int, client: str, rankings: Sequence[Uncertainty]) -> Indices:
    """Sorted row numbers: the seeded first ones, and `budget` more from the pool for every past global model."""
    active.require_rows(rows, client)
    order = numpy_generator_for(seed, "active/start", client=client).permutation(rows)
    labelled, pool, _ = np.split(order, [active.labelled, active.labelled + active.pool])
    for step, uncertainty in enumerate(rankings, start=1):
        if active.acquisition == "entropy":
            # Descending, ties in the order of the pool.
            ranked = np.argsort(-uncertainty(pool), kind="stable")
        else:
            ranked = numpy_generator_for(seed, "active/random", step, client).permutation(len(pool))
        labelled = np.concatenate([labelled, pool[ranked[: active.budget]]])
        pool = pool[np.sort(ranked[active.budget :])]
    return np.sort(labelled)
