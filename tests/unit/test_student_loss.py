"""The student's loss: labels beside the teacher's predictions, mixup in its inputs alone."""

from typing import Any

import numpy as np
import pytest
import torch

from fedppd_ray.bayes.distill import LabelTerm, soft_cross_entropy, student_loss
from fedppd_ray.bayes.mixup import Mix, draw_mix
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.seeding import generator_for, numpy_generator_for

ROWS, CLASSES, SEED = 20, 10, 5
# A chain that stays where it is, so that the student's target is known.
STILL = {"rate": 1e-12, "temperature": 0, "prior_precision": 0, "send": "last"}


def config_of(**changes: Any) -> Config:
    """One epoch of one batch on CIFAR-10's networks, which have no dropout."""
    client = {"epochs": 1, "batch_size": ROWS, **changes.pop("client", {})}
    student = {"rate": 0.1, "weight_decay": 0.01, "input_noise": 0, **changes.pop("student", {})}
    common = {"seed": SEED, "data": {"name": "cifar10"}, "evaluation": {"ood": None}, "teacher": STILL}
    return parse_config({**common, "client": client, "student": student, **changes})


@pytest.fixture(scope="module")
def shard() -> ImageShard:
    generator = np.random.default_rng(2)
    labels = np.array([0] * 8 + [1] * 7 + [2, 3, 4, 5, 6], np.int64)
    images = generator.integers(0, 256, (ROWS, 3, 32, 32)).astype(np.uint8)
    return ImageShard(images, labels, config_of().dataset)


def updated(config: Config, shard: ImageShard, round_id: int = 0) -> tuple[Any, GlobalState, Any]:
    method = build_method(config)
    models = dict(method.initial_models())
    models["teacher"] = np.float32(1.4) * models["teacher"]  # sure of something
    state = GlobalState(round_id, models)
    return method, state, method.local_update("client-00", state, shard, lambda: False)


def expected_student(method: Any, state: GlobalState, inputs: torch.Tensor, labels: torch.Tensor, weight: float,
                     shift: torch.Tensor) -> np.ndarray:  # fmt: skip
    """w − β (∇ [(1 − λ) CE(p_T, f) + λ CE(y, f + shift)] + wd w), with the cross-entropies spelt out."""
    teacher, student = method.networks_by_role["teacher"], method.networks_by_role["student"]
    teacher.load(state.models["teacher"])
    student.load(state.models["student"])
    with torch.no_grad():
        targets = teacher.module(inputs).exp()
        targets /= targets.sum(1, keepdim=True)
    logits = student.module(inputs)
    adjusted = logits + shift
    distilled = (targets * (logits.logsumexp(1, keepdim=True) - logits)).sum(1).mean()
    labelled = (labels * (adjusted.logsumexp(1, keepdim=True) - adjusted)).sum(1).mean()
    gradient = student.backward((1 - weight) * distilled + weight * labelled).numpy()
    start = state.models["student"]
    return np.asarray(start - 0.1 * (gradient + 0.01 * start))


def shift_of(shard: ImageShard, strength: float) -> torch.Tensor:
    assert shard.labels is not None
    return strength * ((torch.bincount(shard.labels, minlength=CLASSES) + 1) / (ROWS + CLASSES)).log()


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_students_step_is_the_equation(shard: ImageShard, strength: float) -> None:
    """Round 2 of 3, λ from .5 to .1: λ = .3. The targets are the unadjusted softmax, whatever τ is."""
    config = config_of(
        client={"label_shift": strength},
        student={"label_weight": 0.5, "label_weight_end": 0.1},
        federation={"rounds": 3},
    )
    method, state, result = updated(config, shard, round_id=1)
    labels = torch.eye(CLASSES)[shard.labels]
    inputs = shard.inputs(torch.arange(ROWS))
    expected = expected_student(method, state, inputs, labels, 0.3, shift_of(shard, strength))
    np.testing.assert_allclose(result.models["student"], expected, atol=1e-6)
    assert not np.allclose(expected, state.models["student"], atol=1e-4)


def test_mixup_mixes_inputs_and_labels_and_the_teacher_is_asked_about_the_mix(shard: ImageShard) -> None:
    """And the chain of the teacher never sees a mixed row: its bits are those without mixup."""
    student = {"mixup": 0.4, "label_weight": 0.25}
    method, state, result = updated(config_of(student=student, teacher={**STILL, "rate": 0.05}), shard)
    _, _, plain = updated(config_of(student={"label_weight": 0.25}, teacher={**STILL, "rate": 0.05}), shard)
    assert np.array_equal(result.models["teacher"], plain.models["teacher"])
    assert not np.array_equal(result.models["student"], plain.models["student"])

    method, state, result = updated(config_of(student=student), shard)
    # The batch is in the order that the client's stream gave it.
    generator = generator_for(SEED, "local", 1, "client-00")
    torch.randperm(ROWS, generator=generator)  # the teacher's epoch
    order = torch.randperm(ROWS, generator=generator)
    drawn = numpy_generator_for(SEED, "mixup", 1, "client-00")
    share, partners = drawn.beta(0.4, 0.4), drawn.permutation(ROWS)
    inputs, labels = shard.inputs(order), torch.eye(CLASSES)[shard.labels[order]]  # type: ignore[index]
    mixed = share * inputs + (1 - share) * inputs[partners]
    both = share * labels + (1 - share) * labels[partners]
    expected = expected_student(method, state, mixed, both, 0.25, torch.zeros(CLASSES))
    np.testing.assert_allclose(result.models["student"], expected, atol=1e-6)


def test_a_mix_is_a_convex_combination() -> None:
    values = torch.arange(6.0).view(3, 2)
    torch.testing.assert_close(
        Mix(0.75, torch.tensor([1, 2, 0])).of(values), torch.tensor([[0.5, 1.5], [2.5, 3.5], [3.0, 4.0]])
    )
    drawn = draw_mix(50, 0.4, np.random.default_rng(0), torch.device("cpu"))
    assert 0 <= drawn.share <= 1
    assert sorted(drawn.order.tolist()) == list(range(50))


def test_without_labels_the_loss_is_distillation_alone_and_with_weight_one_the_labels_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 3, generator=generator), torch.rand(4, 3, generator=generator)
    labels = torch.eye(3)[[0, 1, 2, 0]]
    assert torch.equal(student_loss(logits, targets, None), soft_cross_entropy(logits, targets))
    torch.testing.assert_close(
        student_loss(logits, targets, LabelTerm(1.0, labels)),
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])),
    )


@pytest.mark.parametrize("every", ["epoch", "iteration"])
def test_zeros_are_todays_bits(shard: ImageShard, every: str) -> None:
    plain = updated(config_of(student={"distill_every": every}), shard)[2].models
    zeros = {"distill_every": every, "label_weight": 0.0, "label_weight_end": None, "mixup": 0.0}
    same = updated(config_of(student=zeros), shard)[2].models
    assert all(np.array_equal(plain[role], same[role]) for role in plain)
    other = updated(config_of(student={"distill_every": every, "label_weight": 0.5}), shard)[2].models
    assert np.array_equal(plain["teacher"], other["teacher"])  # labels in the student's loss are the student's alone
    assert not np.array_equal(plain["student"], other["student"])


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"label_weight": 1.0}, r"student\.label_weight: 1 in every round leaves nothing to distil"),
        ({"label_weight_end": 0.0}, r"student\.label_weight_end: .* remove it"),
        ({"label_weight": 1.5}, r"student\.label_weight"),
        ({"mixup": -1}, r"student\.mixup"),
    ],
)
def test_senseless_weights_are_refused(student: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(student=student)
