"""Synthetic outliers: each kind against a slow and simple one, their term in the loss, and whose randomness it is."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedppd_ray.bayes.outliers import (
    OutlierTerm,
    logits_and_penalty,
    noise,
    random_phase,
    shuffled,
    synthetic_outliers,
    uniform_cross_entropy,
    zoomed,
)
from fedppd_ray.config.client import check_client
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.errors import ConfigError
from fedppd_ray.federation.types import GlobalState
from fedppd_ray.methods import build_method
from fedppd_ray.seeding import generator_for

ROWS = 20


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=stream(9))


def bilinear(crop: Tensor, side: int) -> Tensor:
    """Half-pixel centres, edges repeated: one pixel after the other."""
    size = crop.shape[1]
    out = torch.empty(crop.shape[0], side, side)
    for y in range(side):
        for x in range(side):
            v, u = (max(0.0, (at + 0.5) * size / side - 0.5) for at in (y, x))
            top, left = min(int(v), size - 1), min(int(u), size - 1)
            low, right = min(top + 1, size - 1), min(left + 1, size - 1)
            a, b = v - top, u - left
            upper = (1 - b) * crop[:, top, left] + b * crop[:, top, right]
            out[:, y, x] = (1 - a) * upper + a * ((1 - b) * crop[:, low, left] + b * crop[:, low, right])
    return out


@pytest.mark.parametrize("side", [28, 32])
def test_a_zoom_is_the_bilinear_enlargement_of_some_small_crop(side: int) -> None:
    images = pictures(2, side)
    low, high = round(side * 3 / 16), round(side * 3 / 8)
    for image, made in zip(images, zoomed(images, stream()), strict=True):
        # A corner of the enlargement is the corner pixel of the crop: that says where to look.
        corner = (image - made[:, :1, :1]).abs().amax(0)
        top, left = divmod(int(corner.argmin()), side)
        assert corner[top, left] < 1e-6
        sizes = [n for n in range(low, high + 1) if top + n <= side and left + n <= side]
        errors = [float((bilinear(image[:, top : top + n, left : left + n], side) - made).abs().max()) for n in sizes]
        assert min(errors) < 1e-5


def test_zooms_are_of_all_sizes() -> None:
    smooth = torch.arange(32.0).expand(1, 1, 32, 32).expand(400, 1, 32, 32)  # brightness is the column
    made = zoomed(smooth, stream())
    spans = (made.amax((1, 2, 3)) - made.amin((1, 2, 3))).round().int() + 1
    assert set(spans.tolist()) == set(range(6, 13))


@pytest.mark.parametrize("side", [28, 30, 32])
def test_a_shuffle_moves_whole_blocks(side: int) -> None:
    images = pictures(3, side)
    block = side // 4
    moved = 0
    for image, made in zip(images, shuffled(images, stream()), strict=True):
        where = [(y, x) for y in range(0, 4 * block, block) for x in range(0, 4 * block, block)]
        before = [image[:, y : y + block, x : x + block] for y, x in where]
        found = []
        for y, x in where:
            matches = [i for i, part in enumerate(before) if torch.equal(part, made[:, y : y + block, x : x + block])]
            assert len(matches) == 1
            found += matches
        assert sorted(found) == list(range(16))
        moved += found != list(range(16))
        assert torch.equal(made[:, 4 * block :], image[:, 4 * block :])  # what no block covers stays
    assert moved == 3
    assert torch.equal(images, pictures(3, side))  # made of copies


def test_noise_has_many_deviations_and_no_trace_of_the_image() -> None:
    images = pictures(300)
    made = noise(images, stream())
    deviations = made.flatten(1).std(1)
    assert 0.19 < float(deviations.min()) < 0.3
    assert 1.5 < float(deviations.max()) < 1.75
    assert float(deviations.mean()) == pytest.approx(0.95, abs=0.06)
    assert torch.equal(made, noise(torch.zeros_like(images), stream()))


@pytest.mark.parametrize("side", [28, 29, 32])
def test_random_phase_keeps_amplitudes_mean_and_relations_of_colours(side: int) -> None:
    images = pictures(2, side) + 0.7
    made = random_phase(images, stream())
    before, after = torch.fft.fft2(images.double()), torch.fft.fft2(made.double())
    torch.testing.assert_close(after.abs(), before.abs(), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(made.mean((2, 3)), images.mean((2, 3)), atol=1e-5, rtol=0)
    assert not torch.allclose(made, images, atol=0.1)
    # The same turn in every channel: their cross-spectra stay.
    cross = (before[:, 0] * before[:, 1].conj(), after[:, 0] * after[:, 1].conj())
    torch.testing.assert_close(cross[1], cross[0], atol=float(cross[0].abs().max()) * 1e-4, rtol=0)


def test_outliers_come_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedppd_ray.bayes.outliers as room

    # Each kind paints its number, so that they can be counted.
    paint = tuple(lambda images, _, n=n: torch.full_like(images, n) for n in range(4))
    monkeypatch.setattr(room, "KINDS", paint)
    counts = torch.zeros(4, dtype=torch.long)
    generator = stream()
    for _ in range(400):
        made = synthetic_outliers(pictures(40), 10, generator)
        assert made.shape == (10, 3, 32, 32)
        of_batch = torch.bincount(made[:, 0, 0, 0].long(), minlength=4)
        assert sorted(of_batch.tolist()) == [2, 2, 3, 3]
        counts += of_batch
    assert int(counts.min()) > 930  # of 4,000, a quarter each


def test_the_uniform_cross_entropy_is_the_equation_and_lowest_where_nothing_is_known() -> None:
    logits = torch.randn(5, 4, generator=stream())
    probabilities = torch.softmax(logits.double(), 1)
    naive = -sum(0.25 * math.log(value) for row in probabilities.tolist() for value in row) / 5
    assert float(uniform_cross_entropy(logits)) == pytest.approx(naive, rel=1e-5)
    assert float(uniform_cross_entropy(torch.full((2, 4), 3.0))) == pytest.approx(math.log(4))


def test_the_term_is_added_to_logits_that_are_the_networks_own() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 5))
    inputs = pictures(8)
    logits, penalty = logits_and_penalty(network, inputs, OutlierTerm(0.3, 0.5, stream(4)))
    made = synthetic_outliers(inputs, 4, stream(4))
    torch.testing.assert_close(logits, network(inputs))
    assert penalty is not None
    torch.testing.assert_close(penalty, 0.3 * uniform_cross_entropy(network(made)))
    assert logits_and_penalty(network, inputs, None)[1] is None


# ---- in the methods


def config_of(method: str, weight: float, **changes: Any) -> Config:
    client = {"epochs": 1, "batch_size": ROWS, **({"outliers": {"weight": weight, "share": 0.4}} if weight else {})}
    common = {"data": {"name": "cifar10"}, "evaluation": {"ood": None}, "federation": {"rounds": 8}}
    return parse_config({**common, "method": method, "client": client, **changes})


@pytest.fixture(scope="module")
def shard() -> ImageShard:
    generator = np.random.default_rng(2)
    images = generator.integers(0, 256, (ROWS, 3, 32, 32)).astype(np.uint8)
    return ImageShard(images, generator.integers(0, 10, ROWS), config_of("fedavg", 0).dataset)


def sent(config: Config, shard: ImageShard, round_id: int) -> dict[str, Any]:
    method = build_method(config)
    state = GlobalState(round_id - 1, method.initial_models())
    return dict(method.local_update("client-00", state, shard, lambda: False).models)


@pytest.mark.parametrize(("method", "role"), [("fedppd", "student"), ("fedavg", "model")])
def test_outliers_begin_late_and_touch_the_served_network_alone(method: str, role: str, shard: ImageShard) -> None:
    """Eight rounds, start .75: rounds 7 and 8. Before, and in the teacher, every bit is as without them."""
    for round_id, touched in ((1, False), (6, False), (7, True), (8, True)):
        plain, other = (sent(config_of(method, weight), shard, round_id) for weight in (0.0, 0.5))
        assert np.array_equal(plain[role], other[role]) is not touched
        assert all(np.array_equal(plain[name], other[name]) for name in plain if name != role)


def test_a_baselines_step_has_the_term_of_its_clients_own_stream(shard: ImageShard) -> None:
    config = config_of("fedavg", 0.5, baseline={"rate": 0.1, "weight_decay": 0})
    method: Any = build_method(config)
    start = method.initial_models()["model"]
    ours = sent(config, shard, 8)["model"]
    order = torch.randperm(ROWS, generator=generator_for(config.seed, "local", 8, "client-00"))
    inputs = shard.inputs(order)
    made = synthetic_outliers(inputs, 8, generator_for(config.seed, "outliers", 8, "client-00"))
    method.network.load(start)
    network, labels = method.network.module, shard.labels[order]  # type: ignore[index]
    loss = torch.nn.functional.cross_entropy(network(inputs), labels) + 0.5 * uniform_cross_entropy(network(made))
    np.testing.assert_allclose(ours, start - 0.1 * method.network.backward(loss).numpy(), atol=1e-6)


def test_outliers_teach_a_network_to_be_unsure_of_them(shard: ImageShard) -> None:
    def foreign_loss(outliers: dict[str, float]) -> float:
        client = {"epochs": 30, "batch_size": ROWS, "outliers": outliers}
        config = config_of("fedavg", 0, client=client, baseline={"rate": 0.05})
        method: Any = build_method(config)
        method.network.load(sent(config, shard, 1)["model"])
        with torch.no_grad():
            made = synthetic_outliers(shard.inputs(torch.arange(ROWS)), ROWS, stream(77))
            return float(uniform_cross_entropy(method.network.module(made)))

    assert foreign_loss({"weight": 1.0, "share": 1.0, "start": 0.0}) < foreign_loss({}) - 0.01


@pytest.mark.parametrize(
    ("outliers", "message"),
    [
        ({"share": 0.5}, r"client\.outliers\.share: client\.outliers\.weight=0 makes none"),
        ({"start": 0.5}, r"client\.outliers\.start: client\.outliers\.weight=0 makes none"),
        ({"weight": 0.1, "share": 0}, r"client\.outliers\.share"),
        ({"weight": 0.1, "start": 1}, r"client\.outliers\.start"),
    ],
)
def test_senseless_outliers_are_refused(outliers: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"client": {"outliers": outliers}})


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 32, 4), (12,)])
def test_outliers_of_what_is_no_image_are_refused(shape: Any) -> None:
    info = DatasetInfo("mine", ("a", "b"), shape, (0.0,), (1.0,), "none")
    client = parse_config({"client": {"outliers": {"weight": 0.1}}}).client
    with pytest.raises(ValueError, match=r"client\.outliers: they are made of images .* mine has inputs"):
        check_client(client, info)
