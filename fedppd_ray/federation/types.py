"""Messages and state: frozen, and made of weights, counts and metrics only. Raw data is in none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedppd_ray.models.flat import Vector

Models = Mapping[str, Vector]  # role ("teacher", "student", …) → flat vector


@dataclass(frozen=True)
class GlobalState:
    """What the server owns after a round: round 0 is the initialisation."""

    round: int
    models: Models
    # What the server keeps for itself, such as momentum: saved and resumed with the models, sent to no client.
    kept: Models = field(default_factory=dict)

    def broadcast(self) -> "GlobalState":
        """What the clients are sent."""
        return GlobalState(self.round, self.models)


@dataclass(frozen=True)
class Receipt:
    """What a client says about its update, apart from the weights."""

    client: str
    round: int
    rows: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    receipt: Receipt
    models: Models


@dataclass(frozen=True)
class ClientInfo:
    """What the report may know of a client's data: counts, of classes with consent only, and which it holds."""

    client: str
    rows: int
    class_counts: tuple[int, ...]
    holds: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Failure:
    client: str
    reason: str


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round."""

    round: int
    accepted: tuple[Receipt, ...]
    failures: tuple[Failure, ...]  # clients dropped for this round
