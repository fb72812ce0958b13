"""ResNets that start from published weights, and batch normalisation on its way through the server."""

import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedppd_ray.bayes.ensemble import Distillation, distil_ensemble, gaussian_samples, pseudo_labels
from fedppd_ray.config.schema import Config
from fedppd_ray.data.catalog import CATALOG
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.federation.aggregate import StreamingAverage
from fedppd_ray.methods.fedppd import FedPPD
from fedppd_ray.methods.settings import DistillConfig
from fedppd_ray.models.flat import FlatModel, Vector
from fedppd_ray.models.networks import build_network, first_weights, initialise
from fedppd_ray.seeding import generator_for

COLOUR = (3, 32, 32)
FILE = "resnet18-f37072fd.pth"  # torchvision's name of it


def at_rate(settings: DistillConfig, rate: float) -> Distillation:
    return settings.model_copy(update={"teacher_rate": rate}).plan("teacher")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of published weights, and no network."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", refuse)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def published(hub: Path) -> dict[str, Tensor]:
    """Weights of a 1,000-class network where torchvision looks for them."""
    module = build_network("resnet18", (3, 224, 224), 1000)
    initialise(module, generator_for(9, "published"))
    state = module.state_dict()
    state["bn1.running_mean"] += 0.5
    torch.save(state, hub / FILE)
    return state


def fresh(seed: int = 0, pretrained: bool = True) -> FlatModel:
    model = FlatModel(build_network("resnet18", COLOUR, 7))
    first_weights(model.module, "resnet18", generator_for(seed, "init"), pretrained)
    return model


def test_all_but_the_last_layer_is_the_published_network(hub: Path) -> None:
    state = published(hub)
    tensors = fresh().layout.unpack(fresh().export())
    for name, tensor in tensors.items():
        if not name.startswith("fc."):
            assert np.array_equal(tensor, state[name].numpy()), name


def test_the_last_layer_is_of_the_data_set_and_of_the_seed(hub: Path) -> None:
    published(hub)
    first, second = (model.layout.unpack(model.export()) for model in (fresh(0), fresh(1)))
    plain = fresh(0, pretrained=False)
    assert first["fc.weight"].shape == (7, 512)
    assert np.array_equal(first["fc.weight"], plain.layout.unpack(plain.export())["fc.weight"])
    assert not np.array_equal(first["fc.weight"], second["fc.weight"])


def test_published_weights_land_in_the_flat_vector(hub: Path) -> None:
    published(hub)
    model = fresh()
    model.vector.zero_()
    assert not model.module.conv1.weight.any()  # type: ignore[union-attr, operator]


def test_without_weights_or_network_the_error_names_file_and_folder(hub: Path) -> None:
    with pytest.raises(DataError) as caught:
        fresh()
    message = str(caught.value)
    assert FILE in message
    assert str(hub) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "content", [b"", b"damaged", pickle.dumps(print, protocol=2)], ids=["empty", "damaged", "code"]
)
def test_a_damaged_or_foreign_file_of_weights_is_refused(hub: Path, content: bytes) -> None:
    (hub / FILE).write_bytes(content)
    with pytest.raises(DataError, match="pretrained weights of resnet18 could not be had"):
        fresh()


def test_weights_of_another_network_are_refused(hub: Path) -> None:
    torch.save(build_network("resnet34", COLOUR, 10).state_dict(), hub / FILE)
    with pytest.raises(DataError, match=rf"{FILE}: does not fit resnet18"):
        fresh()


def test_fedppd_starts_from_published_weights_where_the_role_asks_for_them(
    tiny: Callable[..., Config], hub: Path
) -> None:
    state = published(hub)
    config = tiny(
        data={"name": "cifar100"},
        evaluation={"ood": None},
        teacher={"pretrained": True},
        student={"network": "resnet18"},
    )
    method = FedPPD(config)
    models = {
        role: method.networks_by_role[role].layout.unpack(vector) for role, vector in method.initial_models().items()
    }
    assert np.array_equal(models["teacher"]["conv1.weight"], state["conv1.weight"].numpy())
    assert not np.array_equal(models["student"]["conv1.weight"], state["conv1.weight"].numpy())


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_a_network_without_published_weights_cannot_be_pretrained(tiny: Callable[..., Config], role: str) -> None:
    with pytest.raises(ConfigError, match=rf"{role}\.pretrained: mnist_{role} has no published weights"):
        tiny(**{role: {"pretrained": True}})


# ---- batch normalisation


@pytest.fixture(scope="module")
def clients() -> list[Vector]:
    """Three networks with running statistics of their own."""
    vectors = []
    for number in range(3):
        model = fresh(number, pretrained=False)
        model.module.train()(3 * torch.randn(8, *COLOUR, generator=generator_for(number, "images")) + number)
        vectors.append(model.export())
    return vectors


def statistics(model: FlatModel, vector: Vector) -> Vector:
    return vector[model.layout.parameters :]


def test_starting_anew_forgets_running_statistics() -> None:
    model = fresh(pretrained=False)
    before = model.export()
    model.module.train()(torch.randn(4, *COLOUR, generator=generator_for(0, "images")))
    initialise(model.module, generator_for(0, "init"))
    assert np.array_equal(model.export(), before)


def test_running_statistics_are_averaged_like_weights(clients: list[Vector]) -> None:
    model, average = fresh(pretrained=False), StreamingAverage(clients[0].size)
    for vector, rows in zip(clients, (1, 2, 5), strict=True):
        average.add(vector, rows)
    expected = np.average([statistics(model, vector) for vector in clients], axis=0, weights=(1, 2, 5))
    assert statistics(model, average.result()) == pytest.approx(expected, rel=1e-5)


def test_samples_of_the_gaussian_take_the_clients_mean_statistics(clients: list[Vector]) -> None:
    model = fresh(pretrained=False)
    settings = DistillConfig(samples=1, spread=5.0)
    (sample,) = gaussian_samples(model.export(), clients, model.layout, settings, generator_for(0, "gaussian"))
    expected = np.mean([statistics(model, vector) for vector in clients], axis=0)
    assert statistics(model, sample) == pytest.approx(expected, rel=1e-5)
    assert not np.array_equal(sample[:100], np.mean([vector[:100] for vector in clients], axis=0))


def test_distillation_leaves_the_statistics_of_the_averaged_network_on_the_pool(clients: list[Vector]) -> None:
    """Cumulative means over batches of the pool: with one batch, exactly that batch's."""
    images = np.random.default_rng(0).integers(0, 256, (8, *COLOUR)).astype(np.uint8)
    pool, model = ImageShard(images, None, CATALOG["cifar10"]), fresh(pretrained=False)
    settings = DistillConfig(epochs=1, batch_size=8)
    targets = pseudo_labels(model, clients[:1], pool, 1.0)
    result = distil_ensemble(model, clients[0], targets, pool, at_rate(settings, 0.01), generator_for(0, "distil"))
    model.load(result)
    inputs = pool.inputs(torch.arange(8))
    with torch.no_grad():
        first = model.module.conv1(inputs)  # type: ignore[operator]
    found = model.layout.unpack(result)
    assert found["bn1.running_mean"] == pytest.approx(first.mean((0, 2, 3)).numpy(), rel=1e-3, abs=1e-5)
    assert found["bn1.running_var"] == pytest.approx(first.var((0, 2, 3)).numpy(), rel=1e-3)
    assert np.isfinite(result).all()
