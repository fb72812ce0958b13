"""FedAvg + SWAG (Maddox et al., NeurIPS 2019): FedAvg, and a Gaussian over the weights from the last round. [4][5]

In the last round a client keeps a snapshot an epoch and sends their mean, second moment and last R deviations
from the running mean. The server mixes the moments by n_k: the mixture's variance holds the spread between the
clients too, and the mixed deviations are those of the averaged path. Prediction averages S networks

    μ + sqrt(1/2) (sqrt(diag) z₁ + D z₂ / sqrt(R − 1)),   z₁, z₂ ~ N(0, I).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedppd_ray.core.types import GlobalState, Models
from fedppd_ray.data.batches import Shard
from fedppd_ray.evaluation.predictive import Predictor, network_predictor
from fedppd_ray.methods.base import LocalResult
from fedppd_ray.methods.fedavg import ROLE, FedAvg
from fedppd_ray.models.flat import FlatModel, Vector
from fedppd_ray.seeding import generator_for

MEAN, SECOND, DEVIATIONS = "swag_mean", "swag_second", "swag_deviations"


class SwagMoments:
    """Mean, second moment and the last `rank` deviations of the vectors it is shown, in float64."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._mean = self._second = torch.zeros(())
        self._deviations: list[Tensor] = []

    def add(self, vector: Tensor) -> None:
        value = vector.detach().double()
        self._count += 1
        self._mean = self._mean + (value - self._mean) / self._count
        self._second = self._second + (value.square() - self._second) / self._count
        self._deviations = [*self._deviations, value - self._mean][-self._rank :]

    def models(self) -> dict[str, Vector]:
        parts = {MEAN: self._mean, SECOND: self._second, DEVIATIONS: torch.stack(self._deviations)}
        return {role: part.flatten().float().cpu().numpy() for role, part in parts.items()}


class FedSWAG(FedAvg):
    one_network = False

    @property
    def _rank(self) -> int:
        return min(self.config.fedswag.rank, self.config.client.epochs)

    def _is_last(self, state: GlobalState) -> bool:
        return state.round + 1 == self.config.federation.rounds

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        if not self._is_last(state):
            return super().local_update(client, state, shard, cancelled)
        moments, losses = SwagMoments(self._rank), []
        for loss in self.epochs(client, state, shard, cancelled):
            losses.append(loss)
            moments.add(self.network.vector)
        return LocalResult({ROLE: self.network.export(), **moments.models()}, {"training_loss": losses[-1]})

    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        size = self.network.layout.size
        if not self._is_last(state):
            return {ROLE: size}
        return {ROLE: size, MEAN: size, SECOND: size, DEVIATIONS: self._rank * size}

    def student(self, models: Models) -> FlatModel:
        """One network cannot be thirty: the mean of the Gaussian, once there is one."""
        self.network.load(models.get(MEAN, models[ROLE]))
        return self.network

    def predictor(self, models: Models) -> Predictor:
        if MEAN not in models:
            return super().predictor(models)
        draw = SwagGaussian(models, self.network.layout.parameters, self.device)
        network, samples, seed = self.network, self.config.fedswag.samples, self.config.seed
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


class SwagGaussian:
    """Draws networks from the mixed moments. Buffers stay at their mean: a running variance must not be negative."""

    def __init__(self, models: Models, parameters: int, device: torch.device) -> None:
        self._mean = torch.from_numpy(models[MEAN].copy())
        size = len(self._mean)
        variance = torch.from_numpy(models[SECOND].copy()).double() - self._mean.double().square()
        self._deviation = variance.clamp_(min=0).sqrt().float()
        self._factors = torch.from_numpy(models[DEVIATIONS].copy()).view(-1, size)
        self._parameters = parameters
        self._device = device

    def __call__(self, generator: torch.Generator) -> Tensor:
        """μ + sqrt(1/2) (sqrt(diag) z₁ + D z₂ / sqrt(R − 1)). Drawn on the CPU: the same on every device."""
        rank = len(self._factors)
        z1 = torch.empty_like(self._mean).normal_(generator=generator)
        z2 = torch.empty(rank).normal_(generator=generator)
        spread = self._deviation * z1 + (z2 @ self._factors) / math.sqrt(max(1, rank - 1))
        spread[self._parameters :] = 0
        return (self._mean + math.sqrt(0.5) * spread).to(self._device)
