"""FedBE (Chen & Chao, ICLR 2021): FedAvg's clients; the server distils a Bayesian ensemble of their models. [5]"""

from fedppd_ray.core.aggregate import StreamingAverage
from fedppd_ray.core.ensemble import server_distillation
from fedppd_ray.core.types import ClientUpdate, GlobalState, Models
from fedppd_ray.data.batches import Shard
from fedppd_ray.methods.base import Aggregation
from fedppd_ray.methods.fedavg import ROLE, FedAvg
from fedppd_ray.models.flat import Vector
from fedppd_ray.seeding import generator_for


class FedBE(FedAvg):
    def aggregation(self, state: GlobalState) -> Aggregation:
        return _Distillation(self, state)


class _Distillation:
    """Gaussian over the clients' models → ensemble → pseudo-labels → SWA from the average."""

    def __init__(self, method: FedBE, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._average = StreamingAverage(method.network.layout.size)
        self._clients: list[Vector] = []

    def fold(self, update: ClientUpdate) -> None:
        self._average.add(update.models[ROLE], update.receipt.rows)
        self._clients.append(update.models[ROLE])

    def finish(self, pool: Shard | None) -> Models:
        if pool is None:
            raise ValueError("distillation on the server needs its unlabelled pool")
        config, round_id = self._method.config, self._state.round + 1
        settings = config.server.distill
        model = server_distillation(
            self._method.network,
            self._state.models[ROLE],
            self._average.result(),
            self._clients,
            pool,
            settings.teacher_rate if config.baseline.network == "teacher" else settings.student_rate,
            settings,
            drawn=generator_for(config.seed, f"gaussian/{ROLE}", round_id),
            stream=generator_for(config.seed, f"distil/{ROLE}", round_id, device=self._method.device),
        )
        return {ROLE: model}
