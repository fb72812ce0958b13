"""The teacher's samplers: their steps exactly, their phases, and a client's round with each."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedppd_ray.bayes.samplers import PSGLD, SGHMC, SGLD, Sampler, Schedule, Target, cosine_rate
from fedppd_ray.bayes.sgld import sgld_step, step_rate
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.rows import ImageShard, Shard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.methods.base import LocalResult
from fedppd_ray.methods.teacher import TeacherConfig, build_sampler
from fedppd_ray.seeding import generator_for

Tiny = Callable[..., Config]
SAMPLERS = ["sgld", "cyclical", "sghmc", "psgld"]
RATE, ROWS, PRIOR = 0.2, 30, 3.0
COLD = Target(ROWS, 0.0, PRIOR)
WARM = Target(ROWS, 0.7, PRIOR)


def constant(exploration: int = 0) -> Schedule:
    return Schedule(lambda _epoch: RATE, exploration)


def vectors(count: int) -> tuple[Tensor, list[Tensor]]:
    generator = generator_for(0, "vectors")
    theta = torch.randn(50, generator=generator, dtype=torch.float64)
    return theta, [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(count)]


def run(sampler: Sampler, theta: Tensor, gradients: list[Tensor], epoch: int = 0) -> None:
    generator = generator_for(0, "noise")
    for gradient in gradients:
        sampler.step(theta, gradient, epoch=epoch, generator=generator)


def noises(count: int) -> list[Tensor]:
    generator = generator_for(0, "noise")
    return [torch.empty(50, dtype=torch.float64).normal_(generator=generator) for _ in range(count)]


# ---- steps


@pytest.mark.parametrize("friction", [0.1, 1.0])
def test_sghmc_at_temperature_zero_is_gradient_descent_with_momentum(friction: float) -> None:
    theta, gradients = vectors(4)
    reference = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([reference], lr=RATE, momentum=1 - friction, weight_decay=PRIOR / ROWS)
    for gradient in gradients:
        reference.grad = gradient.clone()
        optimizer.step()
    run(SGHMC(COLD, constant(), friction), theta, gradients)
    torch.testing.assert_close(theta, reference.detach())


def test_a_step_of_sghmc_is_friction_drift_and_noise_of_the_given_generator() -> None:
    theta, gradients = vectors(3)
    expected, velocity = theta.clone(), torch.zeros(50, dtype=torch.float64)
    for gradient, noise in zip(gradients, noises(3), strict=True):
        drift = gradient + PRIOR / ROWS * expected
        velocity = 0.8 * velocity - RATE * drift + math.sqrt(2 * 0.2 * RATE * 0.7 / ROWS) * noise
        expected = expected + velocity
    run(SGHMC(WARM, constant(), 0.2), theta, gradients)
    torch.testing.assert_close(theta, expected)


def explored(target: Target, decay: float = 0.9, epsilon: float = 0.1) -> tuple[PSGLD, Tensor]:
    """A pSGLD that has explored, and θ after it."""
    sampler = PSGLD(target, constant(exploration=1), decay, epsilon)
    theta, gradients = vectors(5)
    run(sampler, theta, gradients)
    return sampler, theta


def test_psgld_explores_by_preconditioned_gradient_descent() -> None:
    expected, gradients = vectors(5)
    moment = torch.zeros(50, dtype=torch.float64)
    for gradient in gradients:
        moment = 0.9 * moment + 0.1 * gradient**2
        size = moment.sqrt()
        preconditioner = 1 / (0.1 + size / size.mean())
        expected = expected - RATE / 2 * preconditioner * (gradient + PRIOR / ROWS * expected)
    sampler, theta = explored(WARM)
    torch.testing.assert_close(theta, expected)
    torch.testing.assert_close(sampler.preconditioner, preconditioner)


@pytest.mark.parametrize("target", [COLD, WARM])
def test_psgld_samples_by_preconditioned_drift_and_noise(target: Target) -> None:
    sampler, theta = explored(target)
    _, gradients = vectors(8)
    scale = sampler.preconditioner
    assert scale is not None
    scale, expected = scale.clone(), theta.clone()
    for gradient, noise in zip(gradients, noises(8), strict=True):
        expected = expected - RATE / 2 * scale * (gradient + PRIOR / ROWS * expected)
        expected = expected + torch.sqrt(RATE * target.temperature * scale / ROWS) * noise
    run(sampler, theta, gradients, epoch=1)
    torch.testing.assert_close(theta, expected)


def test_the_preconditioner_is_frozen_while_sampling() -> None:
    sampler, theta = explored(WARM)
    assert sampler.preconditioner is not None
    frozen = sampler.preconditioner.clone()
    run(sampler, theta, [100 * gradient for gradient in vectors(6)[1]], epoch=1)
    assert torch.equal(sampler.preconditioner, frozen)


def test_the_preconditioner_does_not_depend_on_the_scale_of_the_loss() -> None:
    small, large = (PSGLD(COLD, constant(exploration=1), 0.9, 0.1) for _ in range(2))
    theta, gradients = vectors(5)
    run(small, theta.clone(), gradients)
    run(large, theta.clone(), [1000 * gradient for gradient in gradients])
    torch.testing.assert_close(small.preconditioner, large.preconditioner)


def test_a_weight_without_gradients_has_the_largest_step_and_none_is_infinite() -> None:
    sampler = PSGLD(COLD, constant(exploration=1), 0.9, 0.25)
    theta, _ = vectors(1)
    run(sampler, theta, [torch.zeros(50, dtype=torch.float64)] * 3)
    torch.testing.assert_close(sampler.preconditioner, torch.full((50,), 4.0, dtype=torch.float64))


def test_psgld_does_not_sample_unexplored() -> None:
    theta, gradients = vectors(1)
    with pytest.raises(ValueError, match="explored"):
        run(PSGLD(WARM, constant(), 0.9, 0.1), theta, gradients)


def test_psgld_with_equal_gradients_is_sgld_at_a_slightly_smaller_step() -> None:
    # G = 1/(e + 1) in every weight.
    sampler = PSGLD(WARM, constant(exploration=1), 0.99, 0.1)
    theta, gradients = vectors(4)
    run(sampler, theta, [torch.full_like(theta, 0.3)])
    expected = theta.clone()
    run(SGLD(WARM, Schedule(lambda _epoch: RATE / 1.1)), expected, gradients)
    run(sampler, theta, gradients, epoch=1)
    torch.testing.assert_close(theta, expected)


def at_epoch_two(name: str, temperature: float, exploration: int) -> Sampler:
    schedule, target = constant(exploration), Target(ROWS, temperature, PRIOR)
    if name == "psgld":
        sampler = PSGLD(target, schedule, 0.9, 0.1)
        run(sampler, *vectors(2))
        return sampler
    return SGHMC(target, schedule, 0.1) if name == "sghmc" else SGLD(target, schedule)


@pytest.mark.parametrize(
    ("temperature", "exploration", "draws"), [(0.7, 2, True), (0.7, 3, False), (0.0, 2, False), (0.0, 3, False)]
)
@pytest.mark.parametrize("name", ["sgld", "sghmc", "psgld"])
def test_noise_is_drawn_when_sampling_above_temperature_zero_only(
    name: str, temperature: float, exploration: int, draws: bool
) -> None:
    sampler = at_epoch_two(name, temperature, exploration)
    theta, gradients = vectors(1)
    generator = generator_for(0, "noise")
    before = generator.get_state()
    sampler.step(theta, gradients[0], epoch=2, generator=generator)
    assert torch.equal(generator.get_state(), before) is not draws


@pytest.mark.parametrize("name", ["sgld", "sghmc", "psgld"])
def test_the_gradient_is_left_alone(name: str) -> None:
    theta, gradients = vectors(1)
    kept = gradients[0].clone()
    run(at_epoch_two(name, 0.7, 2), theta, gradients, epoch=2)
    assert torch.equal(gradients[0], kept)


# ---- what the configuration builds


def built(name: str, epochs: int = 6, **settings: Any) -> Sampler:
    teacher = TeacherConfig(sampler=name, **settings)  # type: ignore[arg-type]
    return build_sampler(teacher, rate=RATE, epochs=epochs, rows=ROWS)


def test_sgld_is_sgld_step_bit_for_bit() -> None:
    theta, gradients = vectors(3)
    expected = theta.clone()
    run(built("sgld", temperature="6/N", prior_precision="0.1*N", rate_step=2, rate_gamma=0.5), theta, gradients, 4)
    generator = generator_for(0, "noise")
    for gradient in gradients:
        sgld_step(
            expected,
            gradient,
            step=RATE * 0.5**2,
            rows=ROWS,
            temperature=6 / ROWS,
            prior_precision=0.1 * ROWS,
            generator=generator,
        )
    assert torch.equal(theta, expected)


def test_the_cyclical_rate_is_torchs_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.045)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    sampler = build_sampler(TeacherConfig(sampler="cyclical"), rate=0.045, epochs=10, rows=ROWS)
    for epoch in range(10):
        assert sampler.schedule.rate(epoch) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()


def test_the_cyclical_rate_starts_at_the_base_and_never_reaches_zero() -> None:
    rates = [cosine_rate(0.3, 8, epoch) for epoch in range(8)]
    assert rates[0] == 0.3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


@pytest.mark.parametrize("name", ["sgld", "sghmc", "psgld"])
def test_the_other_rates_follow_step_lr(name: str) -> None:
    schedule = built(name, rate_step=2, rate_gamma=0.5).schedule
    assert [schedule.rate(epoch) for epoch in range(6)] == [step_rate(RATE, epoch, 2, 0.5) for epoch in range(6)]


@pytest.mark.parametrize(
    ("name", "epochs", "sampling", "expected"),
    [
        ("sgld", 3, None, [0, 1, 2]),
        ("sghmc", 3, None, [0, 1, 2]),
        ("cyclical", 5, None, [2, 3, 4]),
        ("psgld", 4, None, [2, 3]),
        ("psgld", 2, None, [1]),
        ("cyclical", 5, 1, [4]),
        ("psgld", 5, 4, [1, 2, 3, 4]),
    ],
)
def test_the_last_epochs_sample(name: str, epochs: int, sampling: int | None, expected: list[int]) -> None:
    schedule = built(name, epochs, sampling_epochs=sampling).schedule
    assert [epoch for epoch in range(epochs) if schedule.samples(epoch)] == expected


def test_the_knobs_reach_their_samplers() -> None:
    theta, gradients = vectors(3)
    expected = theta.clone()
    run(built("sghmc", friction=0.4, temperature=0.7, prior_precision=PRIOR, rate_gamma=1.0), theta, gradients)
    run(SGHMC(WARM, constant(), 0.4), expected, gradients)
    assert torch.equal(theta, expected)

    theta, gradients = vectors(3)
    expected = theta.clone()
    knobs = {"preconditioner_decay": 0.5, "preconditioner_epsilon": 0.3}
    run(built("psgld", temperature=0.7, prior_precision=PRIOR, rate_gamma=1.0, **knobs), theta, gradients)
    run(PSGLD(WARM, constant(1), 0.5, 0.3), expected, gradients)
    assert torch.equal(theta, expected)


# ---- a client's round


@pytest.fixture(scope="module")
def shard(tiny: Tiny) -> Shard:
    train = load("mnist5k").train
    return ImageShard(train.images[::133][:ROWS], train.labels[::133][:ROWS], tiny().dataset)


def update(config: Config, shard: Shard) -> LocalResult:
    method = build_method(config)
    return method.local_update("client-00", GlobalState(0, method.initial_models()), shard, lambda: False)


@pytest.mark.parametrize("every", ["epoch", "iteration"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_round_is_the_same_bit_for_bit_every_time(tiny: Tiny, shard: Shard, name: str, every: str) -> None:
    config = tiny(client={"epochs": 3}, teacher={"sampler": name}, student={"distill_every": every})
    method = build_method(config)
    state = GlobalState(0, method.initial_models())
    first = method.local_update("client-00", state, shard, lambda: False)
    method.local_update("client-01", state, shard, lambda: False)  # leaves neither momentum nor preconditioner
    again = method.local_update("client-00", state, shard, lambda: False)
    assert all(np.array_equal(first.models[role], again.models[role]) for role in first.models)
    assert first.metrics == again.metrics


def test_each_sampler_goes_its_own_way(tiny: Tiny, shard: Shard) -> None:
    sent = {name: update(tiny(client={"epochs": 3}, teacher={"sampler": name}), shard) for name in SAMPLERS}
    assert len({result.models["teacher"].tobytes() for result in sent.values()}) == len(SAMPLERS)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_teacher_learns_its_labels(tiny: Tiny, shard: Shard, name: str) -> None:
    rate = 0.02 if name == "sghmc" else 0.3  # momentum makes it as fast
    settings = {"sampler": name, "rate": rate, "rate_gamma": 1.0, "temperature": 1e-3, "prior_precision": 0.0}
    still = update(tiny(client={"epochs": 2}, teacher={**settings, "rate": 1e-9}), shard)
    moved = update(tiny(client={"epochs": 30}, teacher=settings), shard)
    before, after = (-result.metrics["log_posterior_per_row"] for result in (still, moved))
    assert after < 0.5 * before


@pytest.mark.parametrize("every", ["epoch", "iteration"])
@pytest.mark.parametrize("name", ["cyclical", "psgld"])
@pytest.mark.parametrize("sampling", [1, 3])
def test_exploration_teaches_the_student_nothing(
    tiny: Tiny, shard: Shard, name: str, every: str, sampling: int
) -> None:
    # At a tiny rate only weight decay moves the student: a factor 0.95 a step, three steps per epoch that samples.
    config = tiny(
        client={"epochs": 4, "batch_size": 10},
        teacher={"sampler": name, "sampling_epochs": sampling},
        student={"distill_every": every, "rate": 1e-8, "weight_decay": 0.05 / 1e-8},
    )
    start = build_method(config).initial_models()["student"]
    expected = 0.95 ** (3 * sampling) * start
    np.testing.assert_allclose(update(config, shard).models["student"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["cyclical", "psgld"])
def test_no_explored_point_is_sent_as_map_however_good(tiny: Tiny, shard: Shard, name: str) -> None:
    # Exploration stays near the start; the one epoch that samples is so hot that it ends at a far lower density.
    settings = {"sampler": name, "sampling_epochs": 1, "rate": 0.05, "temperature": 50.0, "prior_precision": 1.0}
    by_map, last = (
        update(tiny(client={"epochs": 3}, teacher={**settings, "send": send}), shard) for send in ("map", "last")
    )
    cold = update(tiny(client={"epochs": 3}, teacher={**settings, "temperature": 0}), shard)
    assert by_map.metrics["log_posterior_per_row"] < cold.metrics["log_posterior_per_row"]  # the test can tell
    assert np.array_equal(by_map.models["teacher"], last.models["teacher"])


# ---- configuration


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": {"sampler": "hmc"}}, r"^teacher\.sampler: .*'sgld', 'cyclical', 'sghmc' or 'psgld'"),
        ({"teacher": {"sampler": "sghmc", "friction": 0}}, r"^teacher\.friction: .*greater than 0"),
        ({"teacher": {"sampler": "sghmc", "friction": 1.5}}, r"^teacher\.friction: .*less than or equal to 1"),
        ({"teacher": {"friction": 0.2}}, r"^teacher\.friction: .*sgld has no use.*remove it or set .* to sghmc"),
        (
            {"teacher": {"sampler": "sghmc", "sampling_epochs": 2}},
            r"^teacher\.sampling_epochs: .*sghmc has no use.*to cyclical or psgld",
        ),
        (
            {"teacher": {"sampler": "cyclical", "preconditioner_decay": 0.9}},
            r"^teacher\.preconditioner_decay: .*to psgld",
        ),
        ({"teacher": {"preconditioner_epsilon": 1.0}}, r"^teacher\.preconditioner_epsilon: .*to psgld"),
        (
            {"client": {"epochs": 1}, "teacher": {"sampler": "cyclical"}},
            r"^teacher\.sampler: cyclical explores .*client\.epochs=1; set client\.epochs to 2 or more",
        ),
        (
            {"client": {"epochs": 4}, "teacher": {"sampler": "psgld", "sampling_epochs": 4}},
            r"^teacher\.sampling_epochs: 4 of client\.epochs=4 leaves psgld no epoch .*at most 3",
        ),
    ],
)
def test_a_combination_without_sense_is_refused_with_its_key_and_the_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_dumped_configuration_is_accepted_again(name: str) -> None:
    config = parse_config({"teacher": {"sampler": name}})
    assert parse_config(config.values()) == config
