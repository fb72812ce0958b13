"""Randomness derived from identity, never from arrival order or from the process that happens to run.

Every random draw of a run comes from a generator named by (seed, stream, round, client). Two executions that
agree on these names agree on every bit, wherever and in whatever order the work is done.
"""

import hashlib

import numpy as np
import torch


def _derive(seed: int, stream: str, round_id: int, client: str) -> int:
    text = f"{seed}/{stream}/{round_id}/{client}".encode()
    # 63 bits: torch seeds are signed 64-bit integers.
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator_for(
    seed: int, stream: str, round_id: int = 0, client: str = "", device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator for one purpose (`stream`) of one client in one round."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_derive(seed, stream, round_id, client))
    return generator


def numpy_generator_for(seed: int, stream: str, round_id: int = 0, client: str = "") -> np.random.Generator:
    """The same for numpy: partitions, participation and balanced draws."""
    return np.random.Generator(np.random.PCG64(_derive(seed, stream, round_id, client)))
