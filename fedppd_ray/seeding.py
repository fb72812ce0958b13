"""Randomness derived from identity, never from arrival order or from the process that happens to run.

Every random draw of a run comes from a generator named by (seed, stream, round, client). Two executions that
agree on these names agree on every bit, wherever and in whatever order the work is done.
"""

import functools
import hashlib

import numpy as np
import torch

# Where torch keeps the Mersenne twister in a CPU generator's state: 624 words of 32 bits, each in 8 bytes, after the
# seed (8 bytes), two counters (4 each) and the position (8).
_WORDS, _WORDS_AT = 624, 24


def _identity(seed: int, stream: str, round_id: int, client: str) -> bytes:
    return f"{seed}/{stream}/{round_id}/{client}".encode()


def _derive(identity: bytes) -> int:
    # 63 bits: torch seeds are signed 64-bit integers.
    return int.from_bytes(hashlib.sha256(identity).digest()[:8], "big") >> 1


def generator_for(
    seed: int, stream: str, round_id: int = 0, client: str = "", device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator for one purpose (`stream`) of one client in one round.

    On a CPU all 19,968 bits of the generator's state come from the identity: `manual_seed` alone keeps 32 bits of a
    seed, and among 200,000 streams three pairs would draw the very same numbers. A GPU's generator is counter-based
    and takes the whole seed.
    """
    identity = _identity(seed, stream, round_id, client)
    generator = torch.Generator(device=device)
    generator.manual_seed(_derive(identity))
    if generator.device.type == "cpu":
        _fill(generator, np.frombuffer(hashlib.shake_256(identity).digest(4 * _WORDS), "<u4"))
    return generator


def _fill(generator: torch.Generator, words: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> None:
    """Replace the twister's words in a generator that was just seeded."""
    _require_known_layout()
    state = generator.get_state()
    state.numpy()[_WORDS_AT : _WORDS_AT + 8 * _WORDS] = words.astype("<u8").view(np.uint8)
    generator.set_state(state)


@functools.cache
def _require_known_layout() -> None:
    """Once per process: the words are where we write them, or no bit of a run would be what it seems."""
    probe = torch.Generator().manual_seed(5489)
    found = probe.get_state().numpy()[_WORDS_AT : _WORDS_AT + 8 * _WORDS].view("<u8")
    reference = np.random.MT19937()
    reference._legacy_seeding(5489)  # the twister's own seeding, which torch's `manual_seed` is
    expected = reference.state["state"]["key"]
    if not np.array_equal(found, expected):
        raise RuntimeError(f"torch {torch.__version__} keeps its generator's state in another layout; use torch < 2.14")


def numpy_generator_for(seed: int, stream: str, round_id: int = 0, client: str = "") -> np.random.Generator:
    """The same for numpy: partitions, participation and balanced draws."""
    return np.random.Generator(np.random.PCG64(_derive(_identity(seed, stream, round_id, client))))
