"""FedAvg + SWAG (Maddox et al., NeurIPS 2019): FedAvg, and a Gaussian over the weights from the last round. [4][5]

In the last round a client keeps a snapshot per epoch and sends their Gaussian; the server mixes the clients' Gaussians
by n_k (`bayes/swag.py`). Prediction averages S networks drawn from the mixture.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.swag import ClientGaussian, Mixture, SwagGaussian, SwagMoments, mix
from fedppd_ray.config.schema import Config, settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models
from fedppd_ray.inference.predictor import Predictor, network_predictor
from fedppd_ray.methods.base import Aggregation, LocalResult, Row, ServerResult
from fedppd_ray.methods.fedavg import ROLE, FedAvg, FedAvgSettings
from fedppd_ray.methods.paper import LOCAL, authors, figures
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.seeding import generator_for

MEAN, VARIANCE = "swag_mean", "swag_variance"
DEVIATIONS = "swag_deviations"  # of a client
FACTORS = "swag_factors"  # of the clients' mixture


class FedSWAGConfig(Section):
    """SWAG on the clients in the last round."""

    rank: int = Field(default=20, ge=2, description="most deviations that a client keeps, one per local epoch")
    samples: int = Field(default=30, ge=1, description="networks that a prediction averages")


class FedSWAGSettings(FedAvgSettings):
    fedswag: FedSWAGConfig = FedSWAGConfig()


class FedSWAG(FedAvg):
    """FedAvg with a Gaussian over the weights from the last round."""

    name = "fedswag"
    Settings: ClassVar[type[Section]] = FedSWAGSettings
    one_network = False

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return (Row("fedswag", ("method=fedswag",), figures("fedswag"), authors(LOCAL)),)

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self.fedswag = settings_of(config, FedSWAGSettings).fedswag

    @property
    def _rank(self) -> int:
        return min(self.fedswag.rank, self.config.client.epochs)

    def _is_last(self, state: GlobalState) -> bool:
        return state.round + 1 == self.config.federation.rounds

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        if not self._is_last(state):
            return super().local_update(client, state, shard, cancelled)
        moments, losses = SwagMoments(self._rank), []
        for loss in self.epochs(client, state, shard, cancelled):
            losses.append(loss)
            moments.add(self.network.vector)
        models = {
            ROLE: self.network.export(),
            MEAN: moments.mean,
            VARIANCE: moments.variance,
            DEVIATIONS: moments.deviations,
        }
        return LocalResult(models, {"training_loss": losses[-1]})

    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        size = self.network.layout.size
        if not self._is_last(state):
            return {ROLE: size}
        return {ROLE: size, MEAN: size, VARIANCE: size, DEVIATIONS: self._rank * size}

    def aggregation(self, state: GlobalState) -> Aggregation:
        return _Mixing(self, state) if self._is_last(state) else super().aggregation(state)

    def student(self, models: Models) -> FlatModel:
        """One network cannot be thirty: the mean of the Gaussian, once there is one."""
        self.network.load(models.get(MEAN, models[ROLE]))
        return self.network

    def predictor(self, models: Models) -> Predictor:
        if MEAN not in models:
            return super().predictor(models)
        mixture = Mixture(models[MEAN], models[VARIANCE], models[FACTORS])
        draw = SwagGaussian(mixture, self.network.layout.parameters, self.device)
        network, samples, seed = self.network, self.fedswag.samples, self.config.seed
        predict_one = network_predictor(network)

        def predict(inputs: Tensor) -> Tensor:
            # Drawn anew for every batch: thirty large networks would not fit into memory side by side.
            total: Tensor | None = None
            for index in range(samples):
                with torch.no_grad():
                    network.vector.copy_(draw(generator_for(seed, f"swag/{index}")))
                log_p = predict_one(inputs)
                total = log_p if total is None else torch.logaddexp(total, log_p)
            if total is None:
                raise ValueError("fedswag.samples is at least 1")
            return total - math.log(samples)

        return predict

    def complete(self, models: Models) -> bool:
        """A run that was trained for more rounds than it has now never came to its last one."""
        return MEAN in models


class _Mixing:
    """The last round: the models' aggregate as in every round, and the mixture of the clients' Gaussians."""

    def __init__(self, method: FedSWAG, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._rule = method.rule()
        self._clients: list[ClientGaussian] = []

    def fold(self, update: ClientUpdate) -> None:
        models, rows = update.models, update.receipt.rows
        self._rule.add(models, rows)
        self._clients.append(ClientGaussian(rows, models[MEAN], models[VARIANCE], models[DEVIATIONS]))

    def finish(self, pool: Shard | None) -> ServerResult:
        mixed = mix(self._clients)
        gaussian = {MEAN: mixed.mean, VARIANCE: mixed.variance, FACTORS: mixed.factors}
        averaged = self._method.advance(self._state, self._rule.result())
        return ServerResult({**averaged.models, **gaussian}, averaged.kept)
