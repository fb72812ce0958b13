"""Randomness comes from identity alone."""

import itertools

import numpy as np
import torch

from fedppd_ray.seeding import _derive, _identity, generator_for, numpy_generator_for

NAMES = [
    (seed, stream, round_id, client)
    for seed, stream, round_id, client in itertools.product(
        (0, 1, 12), ("local", "init/teacher"), (0, 1, 2, 11), ("", "client-01", "client-11")
    )
]


def draw(name: tuple[int, str, int, str]) -> tuple[float, ...]:
    return tuple(torch.rand(4, generator=generator_for(*name), dtype=torch.float64).tolist())


def draw_numpy(name: tuple[int, str, int, str]) -> tuple[float, ...]:
    return tuple(numpy_generator_for(*name).random(4).tolist())


def test_a_stream_does_not_depend_on_the_order_in_which_streams_are_made() -> None:
    forward = {name: (draw(name), draw_numpy(name)) for name in NAMES}
    backward = {name: (draw(name), draw_numpy(name)) for name in reversed(NAMES)}
    assert forward == backward


def test_every_identity_has_its_own_stream() -> None:
    assert len({draw(name) for name in NAMES}) == len(NAMES)
    assert len({draw_numpy(name) for name in NAMES}) == len(NAMES)


def test_identities_that_read_alike_are_kept_apart() -> None:
    assert draw((1, "a", 12, "")) != draw((11, "a", 2, ""))
    assert draw((1, "a", 1, "2")) != draw((1, "a", 12, ""))


def test_making_and_using_a_generator_leaves_global_state_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    draw(NAMES[0])
    draw_numpy(NAMES[0])
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_a_stream_is_the_same_on_every_machine() -> None:
    # Pinned numbers: a change here changes every published run.
    assert numpy_generator_for(0, "partition").integers(10**9) == 118314294
    assert torch.randint(10**9, (1,), generator=generator_for(0, "local", 1, "client-00")).item() == 465361475


def test_streams_differ_even_where_torch_would_keep_the_same_32_bits_of_their_seeds() -> None:
    """Among 200,000 (round, client) streams a few pairs share them: by the birthday bound 4.7 pairs are expected."""
    seen: dict[int, tuple[int, str, int, str]] = {}
    pairs = []
    for number in range(200_000):
        name = (0, "local", number // 10, f"client-{number % 10:02d}")
        low = _derive(_identity(*name)) & 0xFFFFFFFF
        if low in seen:
            pairs.append((seen[low], name))
        seen[low] = name
    assert pairs
    for one, other in pairs:
        assert draw(one) != draw(other)
        by_seed = [torch.Generator().manual_seed(_derive(_identity(*name))) for name in (one, other)]
        assert torch.equal(*(torch.rand(4, generator=generator) for generator in by_seed))  # the trap is real


def test_the_whole_state_of_a_generator_comes_from_its_identity() -> None:
    """Every word differs between two streams, but for the one in 2³² that may not."""
    one, other = (generator_for(0, "local", round_id).get_state().numpy() for round_id in (1, 2))
    words = [state[24 : 24 + 8 * 624].view("<u8") for state in (one, other)]
    assert (words[0] != words[1]).mean() > 0.99
    assert max(word.max() for word in words) < 2**32
