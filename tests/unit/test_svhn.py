"""SVHN from plain arrays or from its published .mat files."""

from pathlib import Path

import numpy as np
import pytest

from fedppd_ray.data.parts import Split
from fedppd_ray.data.sources import SOURCES
from fedppd_ray.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)


def write(root: Path, images: object = IMAGES, labels: object = np.arange(5)) -> None:
    (root / "SVHN").mkdir()
    np.save(root / "SVHN" / "test_images.npy", np.asarray(images))
    np.save(root / "SVHN" / "test_labels.npy", np.asarray(labels))


def read(root: Path) -> Split:
    return SOURCES["svhn"].read(root, "test")


def test_channels_last_arrays_are_read_channels_first(tmp_path: Path) -> None:
    write(tmp_path)
    assert np.array_equal(read(tmp_path).images[:, 1], IMAGES[..., 1])
    assert read(tmp_path).labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("images", "labels"),
    [(IMAGES / 255, np.arange(5)), (IMAGES[..., 0], np.arange(5)), (IMAGES, np.arange(5) / 2)],
    ids=["floats", "grey", "fractions"],
)
def test_other_arrays_are_refused_by_file(tmp_path: Path, images: object, labels: object) -> None:
    write(tmp_path, images, labels)
    with pytest.raises(DataError, match=f"{tmp_path}/SVHN/test_images.npy: .*expected uint8 N×32×32×3"):
        read(tmp_path)


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "SVHN" / "test_images.npy").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"test_images\.npy or test_labels\.npy cannot be read"):
        read(tmp_path)


def test_a_mat_file_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SVHN").mkdir()
    (tmp_path / "SVHN" / "test_32x32.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"test_32x32\.mat is damaged .*fetch it again"):
        read(tmp_path)
