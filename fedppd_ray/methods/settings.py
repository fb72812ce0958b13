"""Sections that more than one method has, and what the common ones mean in a round."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.ensemble import Distillation
from fedppd_ray.bayes.likelihood import balanced_weights
from fedppd_ray.bayes.outliers import OutlierTerm
from fedppd_ray.bayes.schedule import begun, over_rounds
from fedppd_ray.config.schema import Config
from fedppd_ray.config.section import Section
from fedppd_ray.seeding import generator_for


def rate_factor(config: Config, round_id: int) -> float:
    """What a client's rates are multiplied by in a round."""
    client = config.client
    if client.rate_schedule == "cosine":
        return over_rounds(1.0, client.rate_end, round_id, config.federation.rounds)
    return float(client.rate_decay ** (round_id - 1))


def class_weights(config: Config, labels: Tensor) -> Tensor | None:
    """What a row of each class counts in this client's likelihood; None: every row the same."""
    if config.client.class_weights == "none":
        return None
    return balanced_weights(labels, len(config.dataset.classes))


def outlier_term(config: Config, round_id: int, client: str, device: torch.device) -> OutlierTerm | None:
    """The outliers of a client's round, drawn from a stream of their own; None in rounds without any."""
    outliers = config.client.outliers
    if outliers.weight == 0 or not begun(outliers.start, round_id, config.federation.rounds):
        return None
    generator = generator_for(config.seed, "outliers", round_id, client, device)
    return OutlierTerm(outliers.weight, outliers.share, generator)


class DistillConfig(Section):
    """Server_Update "Distill": Gaussian, ensemble, SWA."""

    epochs: int = Field(default=20, ge=1, description="of the server over its unlabelled rows")
    batch_size: int = Field(default=64, ge=1, description="rows of a minibatch on the server")
    teacher_rate: float = Field(default=0.001, gt=0, description="of SGD on the server, for a teacher's network")
    student_rate: float = Field(default=0.001, gt=0, description="of SGD on the server, for a student's network")
    samples: int = Field(default=10, ge=0, description="M, models drawn from the Gaussian")
    spread: float = Field(default=0.1, ge=0, description="factor on the Gaussian's standard deviation")
    scale: float = Field(default=1.0, gt=0, description="factor on the mean length of the clients' deltas")
    min_variance: float = Field(default=1e-5, ge=0, description="least variance of a weight in the Gaussian")
    pooling: Literal["mixture", "geometric"] = Field(
        default="mixture",
        description="of the ensemble's predictions: their mean, or exp of the mean of their logarithms",
    )
    power: float = Field(default=1.0, gt=0, description="geometric: β, on the pooled prediction")
    sharpen: float = Field(default=1.0, gt=0, description="mixture: pseudo-labels p^(1/sharpen), renormalised")
    divide_by_classes: bool = Field(default=False, description="the authors' loss: KL / number of classes")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of SGD on the server")
    weight_decay: float = Field(default=1e-4, ge=0, description="of SGD on the server")
    swa_start: int = Field(default=500, ge=0, description="step; never later than half of the steps")
    swa_every: int = Field(default=25, ge=1, description="steps between two models of the SWA average")
    every: int = Field(default=1, ge=1, description="rounds that this divides distil, the others average")
    from_round: int = Field(default=1, ge=1, description="rounds before it average")

    def in_round(self, round_id: int) -> bool:
        return round_id >= self.from_round and round_id % self.every == 0

    def plan(self, role: str) -> Distillation:
        """For the network of a role, teacher or student."""
        rate = self.teacher_rate if role == "teacher" else self.student_rate
        return Distillation(
            rate=rate, **self.model_dump(exclude={"teacher_rate", "student_rate", "every", "from_round"})
        )


def check_distill(distill: DistillConfig, rounds: int) -> None:
    """ValueError for a server that is told to distil, but never would, or not as it is told."""
    if distill.pooling == "geometric" and distill.sharpen != 1:
        raise ValueError("server.distill.sharpen: pooling=geometric has power instead; remove sharpen")
    if distill.pooling == "mixture" and distill.power != 1:
        raise ValueError("server.distill.power: pooling=mixture has sharpen instead; remove power")
    if not any(map(distill.in_round, range(1, rounds + 1))):
        raise ValueError(
            f"server.distill: every={distill.every} and from_round={distill.from_round} leave none of "
            f"federation.rounds={rounds} to distil in; lower them"
        )
