"""The paper's networks: their sizes, their order of operations, and dropout that owns its randomness."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedppd_ray.config.nouns import NETWORKS
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import (
    Dropout,
    FemnistStudent,
    LeNet,
    build_network,
    initialise,
    pool_and_relu,
    seed_dropout,
)
from fedppd_ray.seeding import generator_for

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
PAPER = [name for name in NETWORKS if NETWORKS[name].input_shape is not None]


def built(name: str, classes: int = 10) -> nn.Module:
    module = build_network(name, NETWORKS[name].input_shape or COLOUR, classes)
    initialise(module, generator_for(0, "init"))
    return module


def images(name: str, rows: int = 4) -> Tensor:
    return torch.randn(rows, *(NETWORKS[name].input_shape or COLOUR), generator=generator_for(0, "images"))


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("mnist_teacher", 10, 21_840),
        ("mnist_student", 10, 85_670),
        ("femnist_teacher", 52, 190_004),
        ("femnist_student", 52, 6_045_792),
        ("cifar10_teacher", 10, 62_006),
        ("cifar10_student", 10, 144_474),
    ],
)
def test_a_network_has_as_many_parameters_as_the_papers(name: str, classes: int, parameters: int) -> None:
    assert sum(p.numel() for p in built(name, classes).parameters()) == parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gives_a_logit_a_class(name: str) -> None:
    module = built(name, 7).eval()
    assert module(images(name)).shape == (4, 7)


def relu_before_pooling(module: nn.Module, x: Tensor) -> Tensor:
    """The networks as the paper draws them, in evaluation mode: ReLU right after each convolution."""
    if isinstance(module, LeNet):
        x = F.max_pool2d(F.relu(module.conv1(x)), 2)
        x = F.max_pool2d(F.relu(module.conv2(x)), 2).flatten(1)
        for layer in module.hidden:
            x = F.relu(layer(x))
        return module.out(x)
    assert isinstance(module, FemnistStudent)
    x = F.max_pool2d(F.relu(module.conv1(x)), 2)
    x = F.pad(F.max_pool2d(F.relu(module.conv2(x)), 2), (0, 1, 0, 1))
    x = F.max_pool2d(F.relu(module.conv3(x)), 2).flatten(1)
    return module.out(F.relu(module.fc2(F.relu(module.fc1(x)))))


@pytest.mark.parametrize("name", PAPER)
def test_pooling_before_relu_is_the_same_function(name: str) -> None:
    module = built(name).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            module(images(name)), relu_before_pooling(module, images(name)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", PAPER)
def test_a_gradient_is_that_of_the_network_as_the_paper_draws_it(name: str) -> None:
    module = built(name).eval()
    weights = list(module.parameters())
    labels = torch.arange(4)
    fast = torch.autograd.grad(F.cross_entropy(module(images(name)), labels), weights)
    plain = torch.autograd.grad(F.cross_entropy(relu_before_pooling(module, images(name)), labels), weights)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sides", [(8, 8), (7, 5), (2, 9)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_with_and_without_gradients_gives_the_same_bits(sides: tuple[int, int], channels_last: bool) -> None:
    x = torch.randn(3, 6, *sides, generator=generator_for(0, "images"))
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    with torch.no_grad():
        fast = pool_and_relu(x)
    assert torch.equal(fast, F.max_pool2d(F.relu(x), 2))
    assert torch.equal(fast, pool_and_relu(x))
    assert torch.equal(x, kept)


# ---- dropout


def dropped(channels: bool, rows: int = 500) -> Tensor:
    layer = Dropout(0.3, channels=channels)
    seed_dropout(layer, generator_for(0, "drop"))
    shape = (rows, 40, 3, 3) if channels else (rows, 40)
    out: Tensor = layer(torch.ones(shape))
    return out


@pytest.mark.parametrize("channels", [False, True])
def test_dropout_keeps_the_expected_share_and_scales_it_up(channels: bool) -> None:
    out = dropped(channels)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    units = 500 * 40
    kept = float((out != 0).float().mean())
    assert abs(kept - 0.7) < 5 * math.sqrt(0.7 * 0.3 / units)


def test_channel_dropout_drops_whole_maps_and_plain_dropout_single_values() -> None:
    per_map = (dropped(channels=True) != 0).flatten(2).float().mean(2)
    assert set(per_map.unique().tolist()) == {0.0, 1.0}
    layer = Dropout(0.5)
    seed_dropout(layer, generator_for(0, "drop"))
    per_image = (layer(torch.ones(20, 4, 5, 5)) != 0).flatten(2).float().mean(2)
    assert ((per_image > 0) & (per_image < 1)).all()


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.ones(3, 4)
    assert torch.equal(Dropout(0.9).eval()(x), x)


def test_dropout_without_a_generator_says_so_instead_of_using_global_state() -> None:
    with pytest.raises(RuntimeError, match="seed_dropout"):
        Dropout()(torch.ones(2, 2))


@pytest.mark.parametrize("name", ["mnist_student", "femnist_teacher"])
def test_the_same_generator_drops_the_same(name: str) -> None:
    module = built(name).train()
    outputs = []
    for client in ("a", "a", "b"):
        seed_dropout(module, generator_for(0, "drop", 1, client))
        outputs.append(module(images(name)).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("name", ["mnist_teacher", "femnist_student", "resnet18"])
def test_building_initialising_and_running_leave_global_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    module = built(name).train()
    seed_dropout(module, generator_for(0, "drop"))
    module(images(name)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


# ---- initialisation


@pytest.mark.parametrize("name", ["mnist_teacher", "resnet18"])
def test_initialisation_depends_on_its_generator_alone(name: str) -> None:
    vectors = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        module = build_network(name, NETWORKS[name].input_shape or COLOUR, 10)
        initialise(module, generator_for(seed, "init"))
        vectors.append(FlatModel(module).vector.clone())
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_weights_are_xavier_uniform_and_biases_zero() -> None:
    module = built("cifar10_student")
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            fan_out, fan_in = part.weight.shape[0], part.weight.shape[1]
            area = part.weight[0, 0].numel() if part.weight.dim() == 4 else 1
            bound = math.sqrt(6 / ((fan_in + fan_out) * area))
            largest = float(part.weight.detach().abs().max())
            assert 0.95 * bound < largest <= bound
            assert not part.bias.detach().any()


# ---- ResNet


def test_resnet18s_running_statistics_live_in_the_flat_vector() -> None:
    model = FlatModel(built("resnet18"))
    buffers = {name: b for name, b in model.module.named_buffers() if b.is_floating_point()}
    assert len(buffers) == 40  # 20 normalisations, mean and variance each
    assert model.layout.size - model.layout.parameters == sum(b.numel() for b in buffers.values())
    before = model.vector.clone()
    model.module.train()(images("resnet18"))
    changed = (model.vector != before).nonzero().flatten()
    assert len(changed) > 0
    assert int(changed.min()) >= model.layout.parameters
    assert torch.equal(model.module.bn1.running_mean, model.vector[_slot(model, "bn1.running_mean")])


def _slot(model: FlatModel, name: str) -> slice:
    slot = next(slot for slot in model.layout.slots if slot.name == name)
    return slice(slot.start, slot.stop)


def test_resnets_refuse_grey_images() -> None:
    with pytest.raises(ValueError, match="3 channels"):
        build_network("resnet18", GREY, 10)
