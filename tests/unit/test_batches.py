"""Minibatches: every row once, normalised like torchvision, augmented by real crops and flips, same bits again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.data.catalog import CATALOG
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.seeding import generator_for

PAD = 4


def coloured(rows: int, side: int = 8) -> np.ndarray:
    """Images whose pixels are all different and none is 0 (the padding)."""
    generator = np.random.default_rng(2)
    pixels = [generator.permutation(np.arange(1, 3 * side * side + 1)) for _ in range(rows)]
    return np.array(pixels, np.uint8).reshape(rows, 3, side, side)


INFO = DatasetInfo("raw", ("a",), (3, 8, 8), (0.0,) * 3, (1 / 255,) * 3, "none")


def pixels(inputs: Tensor) -> np.ndarray:
    """Back to whole pixel values (INFO's normalisation is the identity)."""
    return np.rint(inputs.numpy()).astype(int)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 130), st.integers(1, 50), st.integers(0, 2**32))
def test_an_epoch_shows_every_row_exactly_once_in_batches_of_equal_size(rows: int, size: int, seed: int) -> None:
    shard = ImageShard(np.zeros((rows, 3, 8, 8), np.uint8), None, INFO)
    batches = [numbers for _, numbers in shard.batches(size, generator_for(seed, "test"))]
    lengths = [len(numbers) for numbers in batches]
    assert sorted(torch.cat(batches).tolist()) == list(range(rows))
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == math.ceil(rows / size)


def test_a_batch_holds_the_images_of_its_row_numbers() -> None:
    images = coloured(10)
    for inputs, rows in ImageShard(images, None, INFO).batches(4, generator_for(0, "test")):
        assert np.array_equal(pixels(inputs), images[rows.numpy()])


def test_the_next_epoch_has_another_order() -> None:
    generator = generator_for(0, "test")
    shard = ImageShard(coloured(50), None, INFO)
    first, second = (torch.cat([rows for _, rows in shard.batches(7, generator)]) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.arange(50))


@pytest.mark.parametrize("name", ["mnist5k", "cifar10"])
def test_normalisation_is_torchvisions_to_tensor_and_normalize(name: str) -> None:
    info = CATALOG[name]
    images = np.random.default_rng(0).integers(0, 256, (5, *info.shape)).astype(np.uint8)
    got = ImageShard(images, None, info).inputs(torch.arange(5))
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (info.mean, info.std))
    expected = (torch.from_numpy(images).double() / 255 - mean) / std
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


def test_a_shard_keeps_its_own_copy_of_the_rows() -> None:
    images, labels = coloured(4), np.arange(4)
    shard = ImageShard(images, labels, INFO)
    before = shard.inputs(torch.arange(4)).clone()
    images[:], labels[:] = 0, 0
    assert torch.equal(shard.inputs(torch.arange(4)), before)
    assert shard.labels is not None
    assert shard.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("channels", [1, 3])
def test_a_shard_never_aliases_a_read_only_source(channels: int) -> None:
    images = coloured(4)[:, :channels].copy()
    images.setflags(write=False)
    labels = np.arange(4)
    labels.setflags(write=False)
    ImageShard(images, labels, INFO)  # torch warns where it wraps a read-only array


# ---- augmentation


def naive_crop(image: np.ndarray, top: int, left: int, flip: bool) -> np.ndarray:
    """Zero-pad by 4, cut at (top, left), mirror: channel by channel, pixel by pixel."""
    channels, height, width = image.shape
    result = np.zeros_like(image, dtype=int)
    for channel in range(channels):
        for y in range(height):
            for x in range(width):
                source_x = left + (width - 1 - x if flip else x) - PAD
                source_y = top + y - PAD
                if 0 <= source_y < height and 0 <= source_x < width:
                    result[channel, y, x] = image[channel, source_y, source_x]
    return result


def recognised(image: np.ndarray, output: np.ndarray) -> tuple[int, int, bool]:
    """Which crop of the image this is; fails if it is none."""
    for flip in (False, True):
        for top in range(2 * PAD + 1):
            for left in range(2 * PAD + 1):
                if np.array_equal(naive_crop(image, top, left, flip), output):
                    return top, left, flip
    raise AssertionError("not a crop of the image")


def test_every_augmented_image_is_a_crop_or_mirrored_crop_of_its_own_row() -> None:
    images = coloured(6, side=8)
    shard = ImageShard(images, None, INFO, augment=True)
    rows = torch.tensor([3, 0, 5, 1])
    for image, output in zip(images[rows.numpy()], pixels(shard.inputs(rows, generator_for(1, "test"))), strict=True):
        recognised(image, output)


def test_crops_are_uniform_independent_and_half_are_mirrored() -> None:
    count = 2000
    image = coloured(1)[0]
    shard = ImageShard(np.repeat(image[None], count, 0), None, INFO, augment=True)
    outputs = pixels(shard.inputs(torch.arange(count), generator_for(0, "test")))
    known = {
        naive_crop(image, top, left, flip).tobytes(): (top, left, flip)
        for top in range(9)
        for left in range(9)
        for flip in (False, True)
    }
    draws = np.array([known[output.tobytes()] for output in outputs])
    for axis in (0, 1):
        seen = np.bincount(draws[:, axis], minlength=9)
        assert np.abs(seen - count / 9).max() < 5 * math.sqrt(count * (1 / 9) * (8 / 9))
    assert abs(draws[:, 2].sum() - count / 2) < 5 * math.sqrt(count / 4)
    correlation = np.corrcoef(draws.T.astype(float)) - np.eye(3)  # top, left and flip are drawn apart
    assert np.abs(correlation).max() < 5 / math.sqrt(count)


def test_augmentation_pads_with_black_before_normalisation() -> None:
    info = DatasetInfo("raw", ("a",), (1, 8, 8), (0.5,), (0.25,), "none")
    white = np.full((400, 1, 8, 8), 255, np.uint8)
    inputs = ImageShard(white, None, info, augment=True).inputs(torch.arange(400), generator_for(0, "test"))
    values = sorted(set(inputs.flatten().tolist()))
    assert values == pytest.approx([-2.0, 2.0], abs=1e-6)


def test_a_shard_augments_only_when_it_is_given_a_generator() -> None:
    images = coloured(5)
    shard = ImageShard(images, None, INFO, augment=True)
    assert np.array_equal(pixels(shard.inputs(torch.arange(5))), images)


@pytest.mark.parametrize("augment", [False, True])
def test_the_same_generator_gives_the_same_bits(augment: bool) -> None:
    shard = ImageShard(coloured(23), None, INFO, augment=augment)
    first, second = (list(shard.batches(5, generator_for(9, "test", 2, "client-01"))) for _ in range(2))
    for (inputs, rows), (same_inputs, same_rows) in zip(first, second, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(rows, same_rows)
