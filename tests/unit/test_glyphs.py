"""The embedded out-of-distribution set."""

import numpy as np
import pytest

from fedppd_ray.data.glyphs import draw_glyphs

SHAPES = [(1, 28, 28), (3, 32, 32)]


@pytest.mark.parametrize("shape", SHAPES)
def test_glyphs_have_the_shape_of_the_set_they_are_held_against(shape: tuple[int, int, int]) -> None:
    images = draw_glyphs(20, shape)
    assert images.shape == (20, *shape)
    assert images.dtype == np.uint8


@pytest.mark.parametrize("shape", SHAPES)
def test_row_i_is_always_the_same_picture(shape: tuple[int, int, int]) -> None:
    assert np.array_equal(draw_glyphs(30, shape)[:10], draw_glyphs(10, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_glyph_is_blank_and_hardly_two_are_alike(shape: tuple[int, int, int]) -> None:
    images = draw_glyphs(100, shape)
    spread = images.reshape(100, -1).astype(float).std(axis=1)
    assert (spread > 5).all()
    assert len({image.tobytes() for image in images}) >= 99


def test_a_grey_glyph_is_white_ink_on_black_like_a_digit() -> None:
    images = draw_glyphs(200, (1, 28, 28))
    ink = (images > 127).mean(axis=(1, 2, 3))
    assert ((ink > 0.01) & (ink < 0.5)).all()
    corners = images[:, 0][:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 0).mean() > 0.95


def test_a_colour_glyph_has_different_channels() -> None:
    images = draw_glyphs(50, (3, 32, 32)).astype(int)
    assert (np.abs(images[:, 0] - images[:, 1]).max(axis=(1, 2)) > 0).all()
