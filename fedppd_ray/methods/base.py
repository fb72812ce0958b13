"""The contract of a federated method: its settings, what a client computes, how the server aggregates, how it predicts.

A method is one class in one file. Its class methods say what a configuration of it must look like and how comparisons
list it; an instance owns the networks of one process and does the work.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from pydantic import Field

from fedppd_ray.config.schema import Config
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models
from fedppd_ray.inference.predictor import Predictor, network_predictor
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import build_network, first_weights
from fedppd_ray.seeding import generator_for


@dataclass(frozen=True)
class LocalResult:
    models: Models
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ServerResult:
    """The next models, and what the server keeps for itself (momentum and the like), saved but sent to nobody."""

    models: Models
    kept: Models = field(default_factory=dict)


class Aggregation(Protocol):
    """One round on the server. `fold` is called in a fixed order, `finish` once."""

    def fold(self, update: ClientUpdate) -> None: ...
    def finish(self, pool: Shard | None) -> ServerResult:
        """The next state; `pool` is there where the method needs one."""


class NetworkConfig(Section):
    """Which network a role has."""

    network: str = Field(
        default="auto", description="by name; auto: one that fits the data; package.module:Class: your own"
    )
    network_args: Mapping[str, Any] = Field(
        default={},
        description="further arguments of its constructor: width, depth, norm of small_cnn, hidden of mlp, …",
    )
    network_source: str | None = Field(
        default=None, description="sha256 of the source of a network of one's own, which is filled in"
    )
    pretrained: bool = Field(default=False, description="start from ImageNet weights (resnet18, resnet34)")


@dataclass(frozen=True)
class Row:
    """A line of `fedppd compare`: a label, and what it changes in the configuration, written as `--set` takes it."""

    label: str
    changes: tuple[str, ...] = ()
    # Experiment of the paper (`studies.paper`) → metric → its figure.
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # What the authors had, where a run may differ: experiment ("" for all of them) → key → value.
    authors: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class Method(ABC):
    """Owns its networks for as long as the process lives; nothing is rebuilt in a round."""

    name: ClassVar[str]
    Settings: ClassVar[type[Section]] = Section  # its own sections of the configuration, as fields
    one_network: ClassVar[bool] = True  # whether it predicts by a forward pass of the network that is exported

    # ---- what a configuration of this method must look like

    @classmethod
    @abstractmethod
    def networks(cls, config: Any) -> Mapping[str, NetworkConfig]:
        """Section ("teacher", "student") → the network that is chosen there, of all that the method builds."""

    @classmethod
    @abstractmethod
    def exported_role(cls, config: Any) -> str:
        """The section whose network is exported and served."""

    @classmethod
    def check(cls, config: Any) -> None:
        """ValueError, with key and remedy, for settings that do not fit together."""
        return

    @classmethod
    def unused(cls, values: Mapping[str, Any]) -> dict[str, str]:
        """Keys that these values leave without a reader → why: who gives them is told, not ignored."""
        return {}

    @classmethod
    def by_rounds(cls, config: Any) -> list[str]:
        """The keys that make a round depend on how many are planned: such a run is resumed with as many."""
        found: list[str] = config.client.by_rounds()
        return found

    @classmethod
    def needs_pool(cls, values: Mapping[str, Any]) -> bool:
        """Whether the server uses unlabelled rows."""
        return False

    @classmethod
    def rates(cls, config: Any) -> str:
        """The keys to lower where training diverges."""
        return "the rates"

    @classmethod
    def server_rates(cls, config: Any) -> str:
        """The keys to lower where the server's own update diverges."""
        return cls.rates(config)

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        """Its lines in a comparison."""
        return (Row(cls.name),)

    @classmethod
    def network_name(cls, config: Any, role: str) -> str:
        chosen = cls.networks(config)[role].network
        return str(config.dataset.network(role)) if chosen == "auto" else chosen

    @classmethod
    def exported_network(cls, config: Any) -> str:
        return cls.network_name(config, cls.exported_role(config))

    # ---- the work

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)

    def build(self, role: str) -> FlatModel:
        """The network of a role, its weights undefined."""
        info = self.config.dataset
        module = build_network(
            self.network_name(self.config, role),
            info.shape,
            len(info.classes),
            self.networks(self.config)[role].network_args,
            generator_for(self.config.seed, f"construct/{role}").initial_seed(),
        )
        return FlatModel(module, self.device)

    def initialise(self, network: FlatModel, role: str) -> None:
        """The weights that a run starts from: the same for a role in every method."""
        generator = generator_for(self.config.seed, f"init/{role}", device=self.device)
        choice = self.networks(self.config)[role]
        first_weights(network.module, self.network_name(self.config, role), generator, choice.pretrained)

    @abstractmethod
    def initial_models(self) -> Models:
        """The models of round 0, by role."""

    @abstractmethod
    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        """A client's work in round `state.round + 1`. Raises LocalUpdateCancelled soon after `cancelled()`."""

    @abstractmethod
    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        """What a client must send in the round after `state`: role → length of its vector."""

    @abstractmethod
    def aggregation(self, state: GlobalState) -> Aggregation:
        """A fresh aggregation for the round after `state`."""

    @abstractmethod
    def student(self, models: Models) -> FlatModel:
        """The network that is exported and served, loaded."""

    def teacher(self, models: Models) -> FlatModel | None:
        """The network that the exported one learns from, loaded; None where there is none."""
        return None

    def predictor(self, models: Models) -> Predictor:
        """How the method predicts with these models."""
        return network_predictor(self.student(models))

    def complete(self, models: Models) -> bool:
        """Whether the models hold all that the method predicts with at the end of a run."""
        return True
