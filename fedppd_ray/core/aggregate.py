"""Weighted average of client models, and the screen that every update must pass before it may count."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.core.types import ClientUpdate
from fedppd_ray.models.flat import Vector

_PIECE = 65_536  # numbers; half a megabyte of float64


class StreamingAverage:
    """Σ n_k v_k / Σ n_k, added one by one in O(model) memory.

    Sums are float64; callers add in a fixed order, so that arrival order cannot change a bit.
    """

    def __init__(self, size: int) -> None:
        self._sum: NDArray[np.float64] = np.zeros(size)
        self._weight = 0

    def add(self, vector: Vector, weight: int) -> None:
        # float32 × int stays exact in float64.
        for part in self._parts():
            self._sum[part] += np.multiply(vector[part], weight, dtype=np.float64)
        self._weight += weight

    def result(self) -> Vector:
        if self._weight == 0:
            raise ValueError("an average of nothing")
        average = np.empty(self._sum.size, np.float32)
        for part in self._parts():
            average[part] = self._sum[part] / self._weight
        return average

    def _parts(self) -> Iterator[slice]:
        """The vector piece by piece: a temporary that stays in the cache costs half as much as one that does not."""
        return (slice(start, start + _PIECE) for start in range(0, self._sum.size, _PIECE))


def refusal(client: str, update: ClientUpdate, round_id: int, sizes: Mapping[str, int]) -> str | None:
    """Why this update of `client` may not reach the global model, or None if it may.

    It must answer this round with vectors of these roles and sizes, and hold finite numbers only.
    """
    receipt = update.receipt
    if receipt.client != client:
        return f"is signed by {receipt.client}"
    if receipt.round != round_id:
        return f"answers round {receipt.round}, not {round_id}"
    if isinstance(receipt.rows, bool) or not isinstance(receipt.rows, int) or receipt.rows < 1:
        return f"claims {receipt.rows!r} rows"
    if set(update.models) != set(sizes):
        return f"sent models {sorted(update.models)}, expected {sorted(sizes)}"
    for role, size in sizes.items():
        vector = update.models[role]
        if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (size,):
            kind = f"{vector.dtype} {vector.shape}" if isinstance(vector, np.ndarray) else type(vector).__name__
            return f"{role} is {kind}, expected float32 {(size,)}"
        if not np.isfinite(vector).all():
            bad = int(np.count_nonzero(~np.isfinite(vector)))
            return f"{role} has {bad} NaN or infinite values of {vector.size}"
    return None
