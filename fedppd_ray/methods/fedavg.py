"""FedAvg (McMahan et al., AISTATS 2017): SGD on every client, the weighted mean of their models. [4][5]

The point-estimate baseline, on the teacher's network or, with `baseline.network: student`, on the student's: part
of what a student gains could be its capacity.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from fedppd_ray.config import Config
from fedppd_ray.core.aggregate import StreamingAverage
from fedppd_ray.core.sgld import step_rate
from fedppd_ray.core.types import ClientUpdate, GlobalState, Models
from fedppd_ray.data.batches import Shard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.evaluation.predictive import Predictor, network_predictor
from fedppd_ray.methods.base import Aggregation, LocalResult
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import build_network, first_weights, seed_dropout
from fedppd_ray.seeding import generator_for

ROLE = "model"


class FedAvg:
    """Also what FedBE, FedAvg+SWAG and FedPA are made of: they differ in what is added to it."""

    one_network = True

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        info = config.dataset
        self.network = FlatModel(build_network(config.exported_network, info.shape, len(info.classes)), self.device)
        self._velocity = torch.zeros_like(self.network.weights)

    def initial_models(self) -> Models:
        """The same start as the network of that role has in FedPPD."""
        config, role = self.config, self.config.baseline.network
        generator = generator_for(config.seed, f"init/{role}", device=self.device)
        first_weights(self.network.module, config.exported_network, generator, config.pretrained(role))
        return {ROLE: self.network.export()}

    # ---- client

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        *_, loss = self.epochs(client, state, shard, cancelled)
        return LocalResult({ROLE: self.network.export()}, {"training_loss": loss})

    def epochs(
        self,
        client: str,
        state: GlobalState,
        shard: Shard,
        cancelled: Callable[[], bool],
        after_step: Callable[[], None] = lambda: None,
    ) -> Iterator[float]:
        """SGD from the global model, epoch by epoch; yields each epoch's mean training loss."""
        config, network = self.config, self.network
        if shard.labels is None:
            raise ValueError("a client's shard needs labels")
        network.load(state.models[ROLE])
        network.module.train()
        self._velocity.zero_()
        generator = generator_for(config.seed, "local", state.round + 1, client, self.device)
        seed_dropout(network.module, generator)
        base = config.baseline.rate or config.teacher.rate / 2
        base *= config.client.rate_decay**state.round
        for epoch in range(config.client.epochs):
            rate = step_rate(base, epoch, config.teacher.rate_step, config.teacher.rate_gamma)
            total = torch.zeros((), device=self.device)
            for inputs, rows in shard.batches(config.client.batch_size, generator):
                if cancelled():
                    raise LocalUpdateCancelled("told to stop: the round's deadline has passed")
                loss = F.cross_entropy(network.module(inputs), shard.labels[rows])
                self._sgd_step(network.backward(loss), rate)
                total += len(rows) * loss.detach()
                after_step()
            yield float(total) / len(shard)

    @torch.no_grad()
    def _sgd_step(self, gradient: torch.Tensor, rate: float) -> None:
        """v ← μ v + ∇ + wd·w;  w ← w − rate·v."""
        settings, weights = self.config.baseline, self.network.weights
        if settings.momentum == 0:
            weights.mul_(1 - rate * settings.weight_decay).add_(gradient, alpha=-rate)
            return
        self._velocity.mul_(settings.momentum).add_(gradient).add_(weights, alpha=settings.weight_decay)
        weights.add_(self._velocity, alpha=-rate)

    # ---- server

    def update_sizes(self, _state: GlobalState) -> Mapping[str, int]:
        return {ROLE: self.network.layout.size}

    def aggregation(self, state: GlobalState) -> Aggregation:
        return AverageAll(self.update_sizes(state))

    # ---- prediction

    def student(self, models: Models) -> FlatModel:
        self.network.load(models[ROLE])
        return self.network

    def predictor(self, models: Models) -> Predictor:
        return network_predictor(self.student(models))


class AverageAll:
    """Σ n_k v_k / Σ n_k of every role that the clients sent, in O(model) memory."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._averages = {role: StreamingAverage(size) for role, size in sizes.items()}

    def fold(self, update: ClientUpdate) -> None:
        for role, average in self._averages.items():
            average.add(update.models[role], update.receipt.rows)

    def finish(self, _pool: Shard | None) -> Models:
        return {role: average.result() for role, average in self._averages.items()}
