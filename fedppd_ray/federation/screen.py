"""The screen that every update must pass before it may count."""

from collections.abc import Mapping

import numpy as np

from fedppd_ray.federation.types import ClientUpdate


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
