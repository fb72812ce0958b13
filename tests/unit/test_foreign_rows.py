"""Rows that belong to no class: named sets at the data's shape, outliers made of rows, and rows made worse."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.nouns import DATASETS
from fedppd_ray.config.schema import Config
from fedppd_ray.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from fedppd_ray.data.datasets import draw_noise, load_ood, resized_from
from fedppd_ray.data.holdings import prepare_data
from fedppd_ray.data.outliers import make_outliers
from fedppd_ray.data.shapes import fitted, resized
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.inference.held_out import HeldOut

GREY = np.random.default_rng(0).integers(0, 256, (12, 1, 28, 28)).astype(np.uint8)
SMOOTH = resized(GREY[:, :, :7, :7], (28, 28))


# ---- shapes


def test_grey_becomes_colour_by_repetition_and_colour_grey_by_the_mean() -> None:
    colour = fitted(GREY, (3, 28, 28))
    assert np.array_equal(colour[:, 2], GREY[:, 0])
    mixed = np.stack([np.full((4, 4), value, np.uint8) for value in (10, 20, 60)])[None]
    assert (fitted(mixed, (1, 4, 4)) == 30).all()
    assert fitted(GREY, (1, 28, 28)) is GREY


def test_resizing_keeps_flat_pictures_flat_and_the_mean_of_others() -> None:
    assert (resized(np.full((2, 1, 28, 28), 77, np.uint8), (32, 32)) == 77).all()
    small = resized(SMOOTH, (14, 14))
    assert small.shape == (12, 1, 14, 14)
    np.testing.assert_allclose(small.mean(axis=(1, 2, 3)), SMOOTH.mean(axis=(1, 2, 3)), atol=1)


# ---- named sets


def write_letters(root: Path) -> None:
    """Two rows of letter A (label 10) and one digit, ink 0 on paper 1."""
    for part in ("train", "test"):
        folder = root / "femnist_leaf" / part
        folder.mkdir(parents=True)
        ink = np.ones(784)
        ink[:392] = 0
        user = {"x": [ink.tolist(), np.ones(784).tolist(), ink.tolist()], "y": [10, 11, 3]}
        content = {"users": ["f0001_01"], "num_samples": [3], "user_data": {"f0001_01": user}}
        (folder / "all_data_0.json").write_text(json.dumps(content))


def test_letters_are_the_test_letters_of_leaf_at_the_datas_shape(tmp_path: Path) -> None:
    write_letters(tmp_path)
    images = load_ood("letters", DATASETS["cifar10"], str(tmp_path))
    assert images.shape == (2, 3, 32, 32)
    assert sorted(images.mean(axis=(1, 2, 3))) == pytest.approx([0, 127.5], abs=2)  # half ink, and an empty page
    assert resized_from("letters", DATASETS["cifar10"]) == (1, 28, 28)
    assert resized_from("letters", DATASETS["mnist"]) is None


def test_noise_is_always_the_same_and_of_the_shape_that_is_asked_for() -> None:
    images = draw_noise(400, (3, 32, 32))
    assert np.array_equal(images[:10], load_ood("noise", DATASETS["cifar10"], rows=400)[:10])
    assert images[::2].std() == pytest.approx(255 / 12**0.5, rel=0.02)  # uniform
    assert images[1::2].std() == pytest.approx(62, rel=0.03)  # Gaussian, its tails cut off
    assert resized_from("noise", DATASETS["cifar10"]) is None


def config_with(ood: object, **data: object) -> Config:
    return parse_config({"data": dict(data), "evaluation": {"ood": ood}})


@pytest.mark.parametrize(
    ("given", "stored", "names"),
    [
        ("noise", "noise", ("noise",)),
        (["noise"], "noise", ("noise",)),
        ([], None, ()),
        (None, None, ()),
        (["glyphs", "noise"], ["glyphs", "noise"], ("glyphs", "noise")),
        (["svhn", "kmnist", "letters", "noise"],) * 2 + (("svhn", "kmnist", "letters", "noise"),),
    ],
)
def test_one_set_several_or_none(given: object, stored: object, names: tuple[str, ...]) -> None:
    config = config_with(given)
    assert config.evaluation.ood_names == names
    assert config.values()["evaluation"]["ood"] == stored
    assert parse_config(config.values()) == config


@pytest.mark.parametrize(
    ("ood", "data", "message"),
    [
        (["noise", "nosie"], {}, "evaluation.ood: unknown data set 'nosie'; did you mean 'noise'"),
        (["noise", "noise"], {}, "evaluation.ood: a set comes twice"),
        ("letters", {"name": "femnist"}, "evaluation.ood: letters is the data itself, femnist"),
        (["kmnist"], {"name": "kmnist"}, "evaluation.ood: kmnist is the data itself"),
    ],
)
def test_a_set_that_is_unknown_twice_or_the_data_itself_is_refused(
    ood: object, data: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(ood, **data)


def test_a_missing_set_is_missed_before_the_run(tmp_path: Path, tiny: Callable[..., Config]) -> None:
    with pytest.raises(DataError, match=r"evaluation\.ood: femnist: .*or noise, which need no file"):
        prepare_data(tiny(data={"root": str(tmp_path)}, evaluation={"ood": ["glyphs", "letters"]}))


def test_held_out_rows_of_several_sets_follow_each_other(tiny: Callable[..., Config]) -> None:
    held_out = HeldOut(tiny(evaluation={"ood": ["noise", "glyphs"]}))
    parts = [held_out.images("ood/noise"), held_out.images("ood/glyphs")]
    assert np.array_equal(held_out.images("ood"), np.concatenate(parts))


# ---- outliers


def test_outliers_are_noise_shuffled_blocks_and_enlarged_patches() -> None:
    images = np.concatenate([SMOOTH, SMOOTH[:1]])
    made = make_outliers(images, np.random.default_rng(1))
    assert made.shape == images.shape
    assert made.dtype == np.uint8
    noise, shuffled, zoomed = made[:5], made[5:10], made[10:]
    roughness = [np.abs(np.diff(part.astype(float), axis=3)).mean() for part in (noise, images, zoomed)]
    assert roughness[0] > 2 * roughness[1] > 2 * roughness[2]
    for before, after in zip(images[5:10], shuffled, strict=True):
        assert np.array_equal(np.sort(before.ravel()), np.sort(after.ravel()))
        assert not np.array_equal(before, after)
    for before, after in zip(images[10:], zoomed, strict=True):
        assert before.min() <= after.min()
        assert after.max() <= before.max()


def test_outliers_of_a_run_are_its_calibration_rows_changed_the_same_way_every_time(
    tiny: Callable[..., Config],
) -> None:
    first, again = HeldOut(tiny()).images("outliers"), HeldOut(tiny()).images("outliers")
    assert np.array_equal(first, again)
    assert len(first) == tiny().data.calibration
    assert len(HeldOut(tiny(data={"calibration": 0})).images("outliers")) == 0


# ---- corruptions


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_repeatable_and_grows_with_its_severity(name: str) -> None:
    images = np.concatenate([SMOOTH, resized(SMOOTH, (28, 28))])
    distances = []
    for severity in SEVERITIES:
        made = corrupted(images, name, severity)
        assert made.shape == images.shape
        assert made.dtype == np.uint8
        assert np.array_equal(made, corrupted(images, name, severity))
        distances.append(np.abs(made.astype(float) - images).mean())
    assert distances[0] > 0.05
    assert distances == sorted(distances)
    assert distances[-1] > 1.5 * distances[0]


def test_contrast_brightness_blur_and_blocks_are_what_they_are_called() -> None:
    flat = np.full((1, 3, 16, 16), 100, np.uint8)
    assert (corrupted(flat, "blur", 5) == 100).all()
    assert (corrupted(flat, "contrast", 3) == 100).all()
    assert (corrupted(flat, "brightness", 4) == 151).all()  # 100 + 0.2 · 255
    assert (corrupted(flat, "pixelate", 2) == 100).all()
    image = SMOOTH[:1]
    wanted = image.mean() + 0.45 * (image - image.mean())
    assert np.abs(corrupted(image, "contrast", 3) - wanted).max() <= 0.51
    pixelated = corrupted(image, "pixelate", 4)[0, 0]
    assert np.array_equal(pixelated[::2, ::2], pixelated[1::2, 1::2])
    blurred = corrupted(image, "blur", 3).astype(float)
    assert blurred.std() < image.std()
    assert blurred.mean() == pytest.approx(image.mean(), abs=2)
    share = (corrupted(flat, "impulse_noise", 5) != 100).any(axis=1).mean()
    assert share == pytest.approx(0.12, abs=0.06)
