"""FedBE (Chen & Chao, ICLR 2021): FedAvg's clients; the server distils a Bayesian ensemble of their models. [5]"""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedppd_ray.bayes.ensemble import server_distillation
from fedppd_ray.config.schema import settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.federation.types import ClientUpdate, GlobalState
from fedppd_ray.methods.base import Aggregation, Row, ServerResult
from fedppd_ray.methods.fedavg import ROLE, FedAvg, FedAvgSettings
from fedppd_ray.methods.paper import LOCAL, SERVER, authors, figures
from fedppd_ray.methods.settings import DistillConfig, check_distill
from fedppd_ray.models.flat import Vector
from fedppd_ray.seeding import generator_for


class EnsembleServerConfig(Section):
    distill: DistillConfig = DistillConfig()


class FedBESettings(FedAvgSettings):
    server: EnsembleServerConfig = EnsembleServerConfig()


class FedBE(FedAvg):
    """FedAvg whose server distils a Bayesian ensemble of the clients' models."""

    name = "fedbe"
    Settings: ClassVar[type[Section]] = FedBESettings

    @classmethod
    def check(cls, config: Any) -> None:
        check_distill(settings_of(config, FedBESettings).server.distill, config.federation.rounds)

    @classmethod
    def needs_pool(cls, values: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def server_rates(cls, config: Any) -> str:
        return f"server.distill.{cls.exported_role(config)}_rate"

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return (Row("fedbe", ("method=fedbe",), figures("fedbe"), authors(LOCAL, SERVER)),)

    def aggregation(self, state: GlobalState) -> Aggregation:
        distils = settings_of(self.config, FedBESettings).server.distill.in_round(state.round + 1)
        return _Distillation(self, state) if distils else super().aggregation(state)


class _Distillation:
    """Gaussian over the clients' models → ensemble → pseudo-labels → SWA from the average."""

    def __init__(self, method: FedBE, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._rule = method.rule()
        self._clients: list[Vector] = []

    def fold(self, update: ClientUpdate) -> None:
        self._rule.add(update.models, update.receipt.rows)
        self._clients.append(update.models[ROLE])

    def finish(self, pool: Shard | None) -> ServerResult:
        if pool is None:
            raise ValueError("distillation on the server needs its unlabelled pool")
        method, round_id = self._method, self._state.round + 1
        settings = settings_of(method.config, FedBESettings).server.distill
        averaged = method.advance(self._state, self._rule.result())
        model = server_distillation(
            method.network,
            self._state.models[ROLE],
            averaged.models[ROLE],
            self._clients,
            pool,
            settings.plan(method.baseline.network),
            drawn=generator_for(method.config.seed, f"gaussian/{ROLE}", round_id),
            stream=generator_for(method.config.seed, f"distil/{ROLE}", round_id, device=method.device),
        )
        return ServerResult({ROLE: model}, averaged.kept)
