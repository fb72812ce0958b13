"""FedAvg (McMahan et al., AISTATS 2017): SGD on every client, the weighted mean of their models. [4][5]

The point-estimate baseline, on the teacher's network or, with `baseline.network: student`, on the student's: part
of what a student gains could be its capacity.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.likelihood import label_loss, label_shift
from fedppd_ray.bayes.outliers import OutlierTerm, logits_and_penalty
from fedppd_ray.bayes.sgld import step_rate
from fedppd_ray.config.schema import Config, settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.errors import LocalUpdateCancelled
from fedppd_ray.federation.aggregate import Rule, build_rule
from fedppd_ray.federation.momentum import with_momentum
from fedppd_ray.federation.types import ClientUpdate, GlobalState, Models
from fedppd_ray.methods.base import Aggregation, LocalResult, Method, NetworkConfig, Row, ServerResult
from fedppd_ray.methods.paper import LOCAL, authors, figures
from fedppd_ray.methods.settings import class_weights, outlier_term, rate_factor
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import seed_dropout
from fedppd_ray.seeding import generator_for

ROLE = "model"


class BaselineConfig(Section):
    """The clients' SGD."""

    network: Literal["teacher", "student"] = Field(default="teacher", description="whose network the baseline trains")
    rate: float = Field(default=0.0225, gt=0, description="of SGD; half of a teacher's is the drift of its chain")
    rate_step: int = Field(default=2, ge=1, description="StepLR: local epochs between two decays")
    rate_gamma: float = Field(default=0.85, gt=0, le=1, description="StepLR: factor of a decay")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of the clients' SGD")
    weight_decay: float = Field(default=1e-4, ge=0, description="of the clients' SGD")


class FedAvgSettings(Section):
    baseline: BaselineConfig = BaselineConfig()
    teacher: NetworkConfig = NetworkConfig()
    student: NetworkConfig = NetworkConfig()


class FedAvg(Method):
    """SGD on every client, the weighted mean of their models.

    Also what FedBE, FedAvg+SWAG and FedPA are made of: they differ in what is added to it.
    """

    name = "fedavg"
    Settings: ClassVar[type[Section]] = FedAvgSettings

    # ---- configuration

    @classmethod
    def exported_role(cls, config: Any) -> str:
        return settings_of(config, FedAvgSettings).baseline.network

    @classmethod
    def networks(cls, config: Any) -> Mapping[str, NetworkConfig]:
        settings = settings_of(config, FedAvgSettings)
        role = settings.baseline.network
        return {role: settings.teacher if role == "teacher" else settings.student}

    @classmethod
    def unused(cls, values: Mapping[str, Any]) -> dict[str, str]:
        role = values.get("baseline", {}).get("network", "teacher")
        other = "student" if role == "teacher" else "teacher"
        return {other: f"baseline.network={role} builds no {other}"}

    @classmethod
    def rates(cls, config: Any) -> str:
        return "baseline.rate"

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        teacher = Row("fedavg", ("method=fedavg", "baseline.network=teacher"), figures("fedavg"), authors(LOCAL))
        return teacher, Row("fedavg_student", ("method=fedavg", "baseline.network=student"))

    # ---- start

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self.baseline = settings_of(config, FedAvgSettings).baseline
        self.network = self.build(self.baseline.network)
        self._velocity = torch.zeros_like(self.network.weights)

    def initial_models(self) -> Models:
        """The same start as the network of that role has in FedPPD."""
        self.initialise(self.network, self.baseline.network)
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
        config, network, settings = self.config, self.network, self.baseline
        if shard.labels is None:
            raise ValueError("a client's shard needs labels")
        network.load(state.models[ROLE])
        network.module.train()
        self._velocity.zero_()
        generator = generator_for(config.seed, "local", state.round + 1, client, self.device)
        seed_dropout(network.module, generator)
        base = settings.rate * rate_factor(config, state.round + 1)
        shift = label_shift(shard.labels, len(config.dataset.classes), config.client.label_shift)
        weights = class_weights(config, shard.labels)
        outliers = outlier_term(config, state.round + 1, client, self.device)
        for epoch in range(config.client.epochs):
            rate = step_rate(base, epoch, settings.rate_step, settings.rate_gamma)
            total = torch.zeros((), device=self.device)
            for inputs, rows in shard.batches(config.client.batch_size, generator):
                if cancelled():
                    raise LocalUpdateCancelled("told to stop: the round's deadline has passed")
                loss = self._loss(inputs, shard.labels[rows], shift, weights, outliers)
                self._sgd_step(network.backward(loss), rate)
                total += len(rows) * loss.detach()
                after_step()
            yield float(total) / len(shard)

    def _loss(
        self,
        inputs: Tensor,
        labels: Tensor,
        shift: Tensor | None,
        weights: Tensor | None,
        outliers: OutlierTerm | None,
    ) -> Tensor:
        """w_y CE(y, softmax(f + τ log π_k)), plus λ_o CE(uniform, softmax f(x̃)) in rounds with outliers x̃."""
        logits, penalty = logits_and_penalty(self.network.module, inputs, outliers)
        loss = label_loss(logits, labels, shift, weights)
        return loss if penalty is None else loss + penalty

    @torch.no_grad()
    def _sgd_step(self, gradient: Tensor, rate: float) -> None:
        """v ← μ v + ∇ + wd·w;  w ← w − rate·v."""
        settings, weights = self.baseline, self.network.weights
        if settings.momentum == 0:
            weights.mul_(1 - rate * settings.weight_decay).add_(gradient, alpha=-rate)
            return
        self._velocity.mul_(settings.momentum).add_(gradient).add_(weights, alpha=settings.weight_decay)
        weights.add_(self._velocity, alpha=-rate)

    # ---- server

    def update_sizes(self, state: GlobalState) -> Mapping[str, int]:
        return {ROLE: self.network.layout.size}

    def rule(self) -> Rule:
        """How the clients' models become one."""
        return build_rule(self.config.federation.aggregation, {ROLE: self.network.layout.size})

    def aggregation(self, state: GlobalState) -> Aggregation:
        return Averaging(self, state)

    def advance(self, state: GlobalState, averages: Models) -> ServerResult:
        """The averages as the next models, with the server's momentum."""
        parameters, momentum = {ROLE: self.network.layout.parameters}, self.config.federation.server_momentum
        return ServerResult(*with_momentum(state, averages, parameters, momentum))

    # ---- prediction

    def student(self, models: Models) -> FlatModel:
        self.network.load(models[ROLE])
        return self.network


class Averaging:
    """The rule's aggregate is the next model, but for the server's momentum."""

    def __init__(self, method: FedAvg, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._rule = method.rule()

    def fold(self, update: ClientUpdate) -> None:
        self._rule.add(update.models, update.receipt.rows)

    def finish(self, pool: Shard | None) -> ServerResult:
        return self._method.advance(self._state, self._rule.result())
