"""A method of one's own: FedProx (Li et al., MLSys 2020) is FedAvg with a pull towards the global model.

FEDPPD_PLUGINS=fedprox makes it known: `method: fedprox`, and a row in `fedppd compare`.
"""

from collections.abc import Callable

import torch
from pydantic import Field

from fedppd_ray import FedAvg, register_method
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods.base import LocalResult, Row
from fedppd_ray.methods.fedavg import ROLE, FedAvgSettings


class ProxConfig(Section):
    mu: float = Field(default=0.1, ge=0, description="strength of the pull")


class FedProxSettings(FedAvgSettings):
    prox: ProxConfig = ProxConfig()


@register_method
class FedProx(FedAvg):
    """FedAvg whose clients stay near the global model: loss + μ/2 ‖w − w_global‖²."""

    name = "fedprox"
    Settings = FedProxSettings

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return (Row("fedprox", ("method=fedprox",)),)

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        start = torch.from_numpy(state.models[ROLE].copy())[: self.network.layout.parameters].to(self.device)
        pull = self.config.prox.mu * self.baseline.rate  # type: ignore[attr-defined]

        def towards_start() -> None:
            with torch.no_grad():
                self.network.weights.lerp_(start, pull)

        *_, loss = self.epochs(client, state, shard, cancelled, after_step=towards_start)
        return LocalResult({ROLE: self.network.export()}, {"training_loss": loss})
