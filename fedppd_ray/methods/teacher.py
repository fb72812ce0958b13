"""The teacher's section of the configuration, the sampler that it describes, and the density that it samples."""

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedppd_ray.bayes.likelihood import shifted
from fedppd_ray.bayes.samplers import PSGLD, SGHMC, SGLD, Sampler, Schedule, Target, cosine_rate
from fedppd_ray.bayes.sgld import log_prior, step_rate
from fedppd_ray.config.schema import RowScaled, for_rows
from fedppd_ray.data.rows import Shard
from fedppd_ray.inference.predictor import BATCH
from fedppd_ray.methods.base import NetworkConfig
from fedppd_ray.models.flat import FlatModel


class TeacherConfig(NetworkConfig):
    """The chain that samples. T = 1 is the Bayes posterior; the authors ran SGLD with T = 4/N."""

    sampler: Literal["sgld", "cyclical", "sghmc", "psgld"] = Field(default="sgld", description="how the chain moves")
    rate: float = Field(default=0.045, gt=0, description="step size η; sghmc drifts by η/friction a step, others η/2")
    rate_step: int = Field(default=2, ge=1, description="StepLR: local epochs between two decays; not in cyclical")
    rate_gamma: float = Field(default=0.85, gt=0, le=1, description="StepLR: factor of a decay")
    temperature: RowScaled = Field(
        default="4/N", description="T of the posterior: 1 is Bayes', 0 no noise; 4/N scales with the client's N rows"
    )
    prior_precision: RowScaled = Field(
        default="1e-4*N", description="τ of the Gaussian prior on the weights; *N and /N scale with the client's rows"
    )
    send: Literal["map", "last"] = Field(
        default="map", description="map: the sample of the highest posterior density; last: the last one"
    )
    sampling_epochs: int | None = Field(
        default=None, ge=1, description="cyclical, psgld: last local epochs, which sample; null: half, rounded up"
    )
    friction: float = Field(default=0.1, gt=0, le=1, description="sghmc: share of the momentum that a step loses")
    preconditioner_decay: float = Field(default=0.99, ge=0, lt=1, description="psgld: memory of squared gradients")
    preconditioner_epsilon: float = Field(
        default=0.1, gt=0, description="psgld: added to a weight's gradient size relative to the mean one"
    )


# Which samplers a setting of the teacher belongs to; elsewhere it would be ignored in silence.
_SAMPLER_KEYS = {
    "sampling_epochs": ("cyclical", "psgld"),
    "friction": ("sghmc",),
    "preconditioner_decay": ("psgld",),
    "preconditioner_epsilon": ("psgld",),
}


def check_sampler(teacher: TeacherConfig, epochs: int) -> None:
    for key, samplers in _SAMPLER_KEYS.items():
        changed = getattr(teacher, key) != TeacherConfig.model_fields[key].default
        if changed and teacher.sampler not in samplers:
            raise ValueError(
                f"teacher.{key}: teacher.sampler={teacher.sampler} has no use for it; "
                f"remove it or set teacher.sampler to {' or '.join(samplers)}"
            )
    if teacher.sampler not in _SAMPLER_KEYS["sampling_epochs"]:
        return
    if epochs < 2:
        raise ValueError(
            f"teacher.sampler: {teacher.sampler} explores before it samples, but client.epochs={epochs}; "
            f"set client.epochs to 2 or more, or teacher.sampler to sgld"
        )
    if teacher.sampling_epochs is not None and teacher.sampling_epochs >= epochs:
        raise ValueError(
            f"teacher.sampling_epochs: {teacher.sampling_epochs} of client.epochs={epochs} leaves {teacher.sampler} no "
            f"epoch to explore in; set it to at most {epochs - 1}"
        )


def build_sampler(settings: TeacherConfig, *, rate: float, epochs: int, rows: int) -> Sampler:
    """The sampler of one client's round of so many epochs; `rate` is η in this round."""
    target = Target(rows, for_rows(settings.temperature, rows), for_rows(settings.prior_precision, rows))
    decaying = partial(_step_lr, rate, settings.rate_step, settings.rate_gamma)
    # Half of the epochs, rounded up: both phases exist from two epochs on.
    exploration = epochs - (settings.sampling_epochs or (epochs + 1) // 2)
    match settings.sampler:
        case "sgld":
            return SGLD(target, Schedule(decaying))
        case "cyclical":
            return SGLD(target, Schedule(partial(cosine_rate, rate, epochs), exploration))
        case "sghmc":
            return SGHMC(target, Schedule(decaying), settings.friction)
        case "psgld":
            schedule = Schedule(decaying, exploration)
            return PSGLD(target, schedule, settings.preconditioner_decay, settings.preconditioner_epsilon)


def _step_lr(base: float, every: int, gamma: float, epoch: int) -> float:
    return step_rate(base, epoch, every, gamma)


@torch.no_grad()
def log_posterior(
    teacher: FlatModel,
    shard: Shard,
    prior_precision: float,
    shift: Tensor | None = None,
    weights: Tensor | None = None,
) -> float:
    """log p(D | θ) + log p(θ), up to a constant: on all rows, unperturbed and not augmented, without dropout.

    `shift` is τ log π_k of the label-shift likelihood, `weights` are the w_c of class weights.
    """
    teacher.module.eval()
    total = log_prior(teacher.weights, prior_precision)
    for rows in torch.arange(len(shard), device=shard.device).split(BATCH):
        log_p = torch.log_softmax(shifted(teacher.module(shard.inputs(rows)), shift), 1)
        labels = labels_of(shard)[rows]
        found = log_p.gather(1, labels[:, None])
        total += float((found if weights is None else weights[labels][:, None] * found).sum(dtype=torch.float64))
    return total


def labels_of(shard: Shard) -> Tensor:
    if shard.labels is None:
        raise ValueError("a client's shard needs labels")
    return shard.labels
