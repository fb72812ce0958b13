"""The contract of a federated method: what a client computes, how the server aggregates, how it predicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fedppd_ray.config import Config
from fedppd_ray.core.types import ClientUpdate, GlobalState, Models
from fedppd_ray.data.batches import Shard
from fedppd_ray.evaluation.predictive import Predictor
from fedppd_ray.models.flat import FlatModel


@dataclass(frozen=True)
class LocalResult:
    models: Models
    metrics: Mapping[str, float]


class Aggregation(Protocol):
    """One round on the server. `fold` is called in a fixed order, `finish` once."""

    def fold(self, update: ClientUpdate) -> None: ...
    def finish(self, pool: Shard | None) -> Models:
        """The next models; `pool` is there where the config distils on the server."""


class Method(Protocol):
    """Owns its networks for as long as the process lives; nothing is rebuilt in a round."""

    one_network: bool  # whether it predicts by a forward pass of the network that is exported

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None: ...

    def initial_models(self) -> Models:
        """The models of round 0, by role."""

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        """A client's work in round `state.round + 1`. Raises LocalUpdateCancelled soon after `cancelled()`."""

    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        """What a client must send in the round after `state`: role → length of its vector."""

    def aggregation(self, state: GlobalState) -> Aggregation:
        """A fresh aggregation for the round after `state`."""

    def student(self, models: Models) -> FlatModel:
        """The network that is exported and served, loaded."""

    def predictor(self, models: Models) -> Predictor:
        """How the method predicts with these models."""
