"""A module bound to one vector: changes pass both ways, sources are copied and never aliased."""

import numpy as np
import pytest
import torch
from torch import nn

from fedppd_ray.bayes.sgld import sgld_step
from fedppd_ray.models.flat import FlatModel, Layout
from fedppd_ray.models.networks import build_network, initialise
from fedppd_ray.seeding import generator_for


def small() -> FlatModel:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    initialise(module, generator_for(0, "init"))
    return FlatModel(module)


def random_vector(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def test_the_vector_holds_parameters_first_and_then_float_buffers() -> None:
    layout = small().layout
    assert [slot.name for slot in layout.slots] == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"),
        *("1.running_mean", "1.running_var"),
    ]
    assert layout.parameters == 12 + 4 + 8 + 8 + 2
    assert layout.size == layout.parameters + 8
    assert [slot.start for slot in layout.slots[1:]] == [slot.stop for slot in layout.slots[:-1]]


def test_the_module_sees_changes_of_the_vector() -> None:
    model = small()
    model.load(random_vector(model.layout.size))
    for name, tensor in {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}.items():
        slot = next((slot for slot in model.layout.slots if slot.name == name), None)
        if slot is not None:
            assert torch.equal(tensor.detach().flatten(), model.vector[slot.start : slot.stop])


def test_the_vector_sees_changes_of_the_module() -> None:
    model = small()
    with torch.no_grad():
        model.module[3].bias.fill_(7)
        model.module[1].running_var.fill_(5)
    named = model.layout.unpack(model.export())
    assert (named["3.bias"] == 7).all()
    assert (named["1.running_var"] == 5).all()


def test_the_flat_gradient_is_autograds() -> None:
    model, inputs = small(), torch.randn(5, 3, generator=generator_for(0, "x"))
    model.backward(model.module(inputs).square().sum())
    flat = model.backward(model.module(inputs).square().sum())  # a second time: no accumulation
    expected = torch.autograd.grad(model.module(inputs).square().sum(), list(model.module.parameters()))
    torch.testing.assert_close(flat, torch.cat([g.flatten() for g in expected]))
    assert flat.shape == (model.layout.parameters,)


def test_a_read_only_source_survives_in_place_updates() -> None:
    """Weights from an object store are shared, read-only views: a chain that aliased them would change everyone's."""
    model = FlatModel(build_network("mnist_teacher", (1, 28, 28), 10))
    source = random_vector(model.layout.size)
    kept = source.copy()
    source.setflags(write=False)
    model.load(source)
    assert not np.shares_memory(source, model.vector.numpy())
    for _ in range(3):
        gradient = torch.ones(model.layout.parameters)
        generator = generator_for(0, "noise")
        sgld_step(model.weights, gradient, step=0.1, rows=10, temperature=1.0, prior_precision=1.0, generator=generator)
    assert np.array_equal(source, kept)
    assert not np.array_equal(model.export(), kept)


def test_an_export_is_the_callers_own() -> None:
    model = small()
    exported = model.export()
    assert not np.shares_memory(exported, model.vector.numpy())
    exported[:] = 9
    assert not (model.vector == 9).any()
    assert exported.dtype == np.float32


def test_load_and_export_are_inverse_bit_for_bit() -> None:
    model = small()
    vector = random_vector(model.layout.size)
    model.load(vector)
    assert np.array_equal(model.export(), vector)


def test_pack_is_the_inverse_of_unpack() -> None:
    layout = small().layout
    vector = random_vector(layout.size)
    named = layout.unpack(vector)
    assert {name: array.shape for name, array in named.items()} == {slot.name: slot.shape for slot in layout.slots}
    assert np.array_equal(layout.pack(named), vector)
    assert np.array_equal(layout.pack(dict(reversed(named.items()))), vector)


@pytest.mark.parametrize("shape", [(10,), (41,), (43,), (42, 1), ()])
def test_a_vector_of_another_size_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    model = small()
    assert model.layout.size == 42
    before = model.export()
    with pytest.raises(ValueError, match="does not fit a model of 42 numbers"):
        model.load(np.ones(shape, np.float32))
    assert np.array_equal(model.export(), before)


def test_weights_are_a_window_on_the_parameters_alone() -> None:
    model = small()
    model.weights.zero_()
    assert not any(p.detach().any() for p in model.module.parameters())
    assert (model.module[1].running_var == 1).all()


def test_a_layout_depends_on_the_module_alone() -> None:
    assert Layout.of(small().module) == small().layout
