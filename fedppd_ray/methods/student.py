"""The student's section of the configuration, and what its loss is made of in one client's round."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.distill import LabelTerm
from fedppd_ray.bayes.mixup import Mix, draw_mix
from fedppd_ray.bayes.outliers import OutlierTerm
from fedppd_ray.bayes.schedule import over_rounds
from fedppd_ray.config.schema import Config
from fedppd_ray.methods.base import NetworkConfig
from fedppd_ray.methods.settings import outlier_term, rate_factor
from fedppd_ray.seeding import numpy_generator_for


class StudentConfig(NetworkConfig):
    """The network that learns the predictive distribution."""

    rate: float = Field(default=0.055, gt=0, description="of the student's SGD")
    weight_decay: float = Field(default=1e-4, ge=0, description="of the student's SGD")
    input_noise: float = Field(default=0.001, ge=0, description="std on normalised inputs")
    distill_every: Literal["epoch", "iteration"] = Field(
        default="epoch", description="distil after each epoch of the chain, or after each of its steps"
    )
    label_weight: float = Field(
        default=0.0, ge=0, le=1, description="λ: share of the labels in the loss; 0: the teacher's predictions alone"
    )
    label_weight_end: float | None = Field(
        default=None, ge=0, le=1, description="λ of the last round, by cosine over the rounds; null: as in the first"
    )
    mixup: float = Field(default=0.0, ge=0, description="α: rows mixed by Beta(α, α), for the student alone; 0: none")

    def label_weight_in(self, round_id: int, rounds: int) -> float:
        end = self.label_weight if self.label_weight_end is None else self.label_weight_end
        return over_rounds(self.label_weight, end, round_id, rounds)


def student_by_rounds(student: StudentConfig) -> list[str]:
    """The keys that make a round depend on how many are planned."""
    return ["student.label_weight_end"] if student.label_weight_end not in (None, student.label_weight) else []


def check_student(student: StudentConfig) -> None:
    if student.label_weight == 1 and student.label_weight_end in (None, 1):
        raise ValueError(
            "student.label_weight: 1 in every round leaves nothing to distil; lower it, or set method to fedavg and "
            "baseline.network to student"
        )
    if student.label_weight == 0 and student.label_weight_end == 0:
        raise ValueError("student.label_weight_end: student.label_weight=0 has nothing to end; remove it")


@dataclass(frozen=True)
class StudentPlan:
    """One client's round: rate, labels, mixup and outliers of its student."""

    rate: float
    classes: int
    label_weight: float
    shift: Tensor | None  # τ log π_k
    weights: Tensor | None  # w_c
    mixup: float
    mixing: np.random.Generator
    outliers: OutlierTerm | None

    def draw_mix(self, rows: Tensor) -> Mix | None:
        """Whom the rows of a batch are mixed with; drawn only where mixup is on."""
        return draw_mix(len(rows), self.mixup, self.mixing, rows.device) if self.mixup else None

    def label_term(self, labels: Tensor, mix: Mix | None) -> LabelTerm | None:
        if self.label_weight == 0:
            return None
        targets = F.one_hot(labels, self.classes).float()
        if self.weights is not None:
            targets = targets * self.weights
        return LabelTerm(self.label_weight, targets if mix is None else mix.of(targets), self.shift)


def plan_student(
    config: Config,
    student: StudentConfig,
    client: str,
    round_id: int,
    shift: Tensor | None,
    weights: Tensor | None,
    device: torch.device,
) -> StudentPlan:
    """`shift` is the client's τ log π_k and `weights` its w_c, which its teacher has too.

    Weights count in the term of the labels alone: what the teacher predicts for a row, the student should as well.
    """
    return StudentPlan(
        rate=student.rate * rate_factor(config, round_id),
        classes=len(config.dataset.classes),
        label_weight=student.label_weight_in(round_id, config.federation.rounds),
        shift=shift,
        weights=weights,
        mixup=student.mixup,
        mixing=numpy_generator_for(config.seed, "mixup", round_id, client),
        outliers=outlier_term(config, round_id, client, device),
    )
