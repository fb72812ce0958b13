"""FedPA: federated posterior averaging (Al-Shedivat et al., ICLR 2021). [4][5]

A client runs burn-in epochs, then takes the mean of each epoch's iterates as one approximate posterior sample, and
sends its delta Σ̂⁻¹(x̄ − θ), which moves the global model towards the mode of the product of the clients' Gaussian
posteriors instead of towards the mean of their optima. The server steps along the weighted mean of the deltas;
rounds before `fedpa.start_round` are FedAvg's.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.config.schema import Config, settings_of
from fedppd_ray.config.section import Section
from fedppd_ray.data.rows import Shard
from fedppd_ray.federation.types import ClientUpdate, GlobalState
from fedppd_ray.methods.base import Aggregation, LocalResult, Row, ServerResult
from fedppd_ray.methods.fedavg import ROLE, FedAvg, FedAvgSettings
from fedppd_ray.methods.paper import LOCAL, authors, figures


class FedPAConfig(Section):
    """FedAvg's clients, which send a delta that their covariance has corrected."""

    start_round: int = Field(default=1, ge=1, description="FedAvg before it")
    burn_in: int | None = Field(default=None, ge=0, description="local epochs before the first sample; null: half")
    shrinkage: float = Field(default=0.01, ge=0, description="ρ of the covariance estimate; 0 is FedAvg's delta")
    server_rate: float = Field(default=1.0, gt=0, description="the server's step along the mean delta")


class FedPASettings(FedAvgSettings):
    fedpa: FedPAConfig = FedPAConfig()


def posterior_delta(theta: Tensor, samples: Sequence[Tensor], rho: float) -> Tensor:
    """Σ̂⁻¹(x̄ − θ) of the samples x_1 … x_n, in O(n² d) time and O(n d) memory.

    The covariance is the shrinkage estimate Σ̂ = ρ_n I + (1 − ρ_n) S with S the sample covariance (ddof 1) and
    ρ_n = 1/(1 + (n − 1)ρ). Sherman–Morrison, sample by sample: with γ_n = ρ(n − 1)/n and D_1 = x_1 − θ

        u_n = x_n − mean(x_1 … x_{n−1})
        v_n = u_n − Σ_{k=2}^{n−1} γ_k (v_k·u_n) / (1 + γ_k v_k·u_k) v_k
        D_n = D_{n−1} + [1 − γ_n (n D_{n−1}·u_n + v_n·u_n) / (1 + γ_n v_n·u_n)] v_n / n
        Δ = (1 + (n − 1)ρ) D_n
    """
    delta = samples[0] - theta
    mean = samples[0].clone()
    directions: list[tuple[Tensor, Tensor]] = []  # v_k and γ_k / (1 + γ_k v_k·u_k)
    for n, sample in enumerate(samples[1:], start=2):
        gamma = rho * (n - 1) / n
        u = sample - mean
        v = u.clone()
        for earlier, factor in directions:
            v -= factor * (earlier @ u) * earlier
        vu = v @ u
        factor = gamma / (1 + gamma * vu)
        delta = delta + (1 - factor * (n * (delta @ u) + vu)) * v / n
        directions.append((v, factor))
        mean += (sample - mean) / n
    return (1 + (len(samples) - 1) * rho) * delta


class FedPA(FedAvg):
    """FedAvg towards the mode of the product of the clients' posteriors."""

    name = "fedpa"
    Settings: ClassVar[type[Section]] = FedPASettings

    @classmethod
    def check(cls, config: Any) -> None:
        burn_in = settings_of(config, FedPASettings).fedpa.burn_in
        if (burn_in or 0) >= config.client.epochs:
            raise ValueError(
                f"fedpa.burn_in: {burn_in} of client.epochs={config.client.epochs} leaves no epoch to sample in; lower "
                f"it"
            )

    @classmethod
    def server_rates(cls, config: Any) -> str:
        return "fedpa.server_rate"

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return (Row("fedpa", ("method=fedpa",), figures("fedpa"), authors(LOCAL)),)

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self.fedpa = settings_of(config, FedPASettings).fedpa

    def local_update(self, client: str, state: GlobalState, shard: Shard, cancelled: Callable[[], bool]) -> LocalResult:
        """Sends θ + Δ, so that the server's average of models is θ plus the average of deltas."""
        settings = self.fedpa
        if state.round + 1 < settings.start_round:
            return super().local_update(client, state, shard, cancelled)
        burn_in = self.config.client.epochs // 2 if settings.burn_in is None else settings.burn_in
        network = self.network
        total = torch.zeros(network.layout.parameters, device=self.device, dtype=torch.float64)
        steps = 0
        samples: list[Tensor] = []

        def add_iterate() -> None:
            nonlocal steps
            total.add_(network.weights.detach())
            steps += 1

        losses = []
        for loss in self.epochs(client, state, shard, cancelled, add_iterate):
            losses.append(loss)
            if len(losses) > burn_in:
                samples.append(total / steps)
            total.zero_()
            steps = 0
        start = torch.from_numpy(np.array(state.models[ROLE])).to(self.device)[: network.layout.parameters].double()
        delta = posterior_delta(start, samples, settings.shrinkage)
        with torch.no_grad():
            network.weights.copy_(start + delta)  # buffers stay as the last iterate left them
        return LocalResult({ROLE: network.export()}, {"training_loss": losses[-1]})

    def aggregation(self, state: GlobalState) -> Aggregation:
        if state.round + 1 < self.fedpa.start_round:
            return super().aggregation(state)
        return _ServerStep(self, state)


class _ServerStep:
    """SGD on the server with −Σ p_k Δ_k as gradient: θ ← θ + rate · Σ p_k Δ_k. Buffers are averaged."""

    def __init__(self, method: FedPA, state: GlobalState) -> None:
        self._method = method
        self._state = state
        self._rule = method.rule()
        self._rate = method.fedpa.server_rate
        self._parameters = method.network.layout.parameters

    def fold(self, update: ClientUpdate) -> None:
        self._rule.add(update.models, update.receipt.rows)

    def finish(self, pool: Shard | None) -> ServerResult:
        model = self._rule.result()[ROLE]
        weights, start = model[: self._parameters], self._state.models[ROLE][: self._parameters]
        model[: self._parameters] = start + self._rate * (weights.astype(np.float64) - start)
        return self._method.advance(self._state, {ROLE: model})
