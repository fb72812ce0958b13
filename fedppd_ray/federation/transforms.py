"""What a client's update passes before it leaves: a chain of functions by name, none unless the configuration says so.

A transform sees the models that the client was sent and those that it would send, and returns what it sends instead
(clipped, noised, compressed, …). It runs at the client, before anybody else sees the update.
"""

from collections.abc import Sequence
from typing import Protocol

from fedppd_ray.config.nouns import TRANSFORMS
from fedppd_ray.federation.types import ClientUpdate, GlobalState


class Transform(Protocol):
    def __call__(self, update: ClientUpdate, state: GlobalState, seed: int) -> ClientUpdate:
        """`state` is what the client started from; randomness comes from `generator_for(seed, …)` alone."""


def transformed(names: Sequence[str], update: ClientUpdate, state: GlobalState, seed: int) -> ClientUpdate:
    """The update after each of the named transforms, in this order."""
    for name in names:
        transform: Transform = TRANSFORMS[name]
        update = transform(update, state, seed)
    return update
