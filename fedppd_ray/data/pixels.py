"""A picture as the network takes it: the one treatment that training, `predict` and the service share.

What a file holds is kept, or refused by name: 16 bits stay 16 bits, a picture is turned as its EXIF says, transparency
is dropped only where there is none. No torch: the service's decoder processes import this file and little else.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from fedppd_ray.data.parts import BYTES
from fedppd_ray.errors import ConfigError

WORDS, UNIT = (0.0, 65535.0), (0.0, 1.0)  # the range of 16 bits, and of DICOM once it is windowed
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_GREY = ("1", "L", "LA", "La")
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
_ALPHA_BANDS = frozenset("Aa")
_BITS: dict[tuple[float, ...], str] = {BYTES: "of 8 bits", WORDS: "of 16 bits"}
_TRANSPARENT = (
    "the image has transparent pixels, and what lies behind them is not known: flatten it onto the background that the "
    "model's images have, or give all images an alpha channel and say 'shape': [{channels}, height, width] in "
    "dataset.json"
)
# How cameras say that they were held sideways, and what makes the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = NDArray[Any]  # height × width × channels: uint8, uint16 or float32


class ImageContentError(ConfigError):
    """A readable image that the model must not be shown as it is; the message says what is wrong with it."""


@dataclass(frozen=True)
class Wanted:
    """What rows are made of: `shape` (channels, height, width), the range of their values, and whether to resize.

    `convert` is for pictures to predict, which need not be like the training's: colours become grey, 16 bits 8.
    """

    shape: tuple[int, ...]
    range: tuple[float, float] = BYTES
    resize: bool = False
    convert: bool = False


def to_predict(shape: tuple[int, ...], span: tuple[float, float]) -> Wanted:
    return Wanted(shape, span, resize=True, convert=True)


def picture(image: Image.Image, wanted: Wanted | None = None) -> Pixels:
    """The pixels of an opened file, upright. `wanted` decides whether alpha is a channel, and what is converted."""
    deep_colour = _sixteen_bit_colour(image)
    image.load()  # a broken picture fails here, as such
    if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
        raise ImageContentError(f"the file holds {getattr(image, 'n_frames', 1)} pages; save the one that is meant")
    turn = _turn_of(image)
    if turn is not None:
        image = image.transpose(turn)
    to_bytes = wanted is not None and wanted.convert and wanted.range == BYTES
    if deep_colour and not to_bytes:
        raise ImageContentError(
            "the image is of 16 bits in colour, of which 8 would be read; save it as .npy (uint16, H×W×3) or in 8 bits"
        )
    if image.mode in _WIDE_MODES:
        wide = _wide_values(image)[..., None]
        # Rounded, in integers; Pillow's own conversion cuts values off at 255, which leaves black and white.
        return ((wide.astype(np.uint32) + 128) // 257).astype(np.uint8) if to_bytes else wide
    if image.mode == "F" and (wanted is None or wanted.range not in _BITS):
        return np.asarray(image, np.float32)[..., None]
    if image.mode not in (*_GREY, *_COLOUR):
        raise ImageContentError(f"the image's mode is {image.mode!r}; save it with 8 or 16 bits in grey or colour")
    return _eight_bits(image, wanted)


def fit(pixels: Pixels, wanted: Wanted) -> NDArray[Any]:
    """Channels × height × width of these pixels, checked for the range of values, and brought to the shape."""
    _check_values(pixels, wanted)
    channels, height, width = wanted.shape
    if wanted.convert and (pixels.shape[2], channels) == (3, 1) and pixels.dtype == np.uint8:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    pixels = _with_channels(pixels, channels)
    if pixels.shape[:2] != (height, width):
        if not wanted.resize:
            raise ImageContentError(
                f"{pixels.shape[0]}×{pixels.shape[1]} pixels where the others have {height}×{width}; "
                f"bring all images to one size, or set data.resize: [{height}, {width}]"
            )
        pixels = _resized(pixels, height, width)
    return pixels.transpose(2, 0, 1)


def range_of(pixels: Pixels) -> tuple[float, float] | None:
    """What the type says; None of floats."""
    return {"uint8": BYTES, "uint16": WORDS}.get(str(pixels.dtype))


def hint_for(values: NDArray[Any], span: tuple[float, float]) -> str | None:
    """Values that use a small part of the range were most likely scaled for another model."""
    low, high = span
    if values.dtype == np.uint8 and span == BYTES:
        return None
    largest = float(values.max())
    if low < 0 or not largest > 0:
        return None
    for scaled, least in ((1, BYTES[1]), (BYTES[1], WORDS[1])):
        if largest <= scaled and high >= least:
            return (
                f"all pixel values lie within 0–{scaled:g}, and this model takes {low:g}–{high:g}: "
                f"multiply them by {high / scaled:g}"
            )
    return None


def _sixteen_bit_colour(image: Image.Image) -> bool:
    """Pillow reads the upper 8 bits of these and says nothing. Known before the file is loaded only."""
    tiles = getattr(image, "tile", None) or []
    how = tiles[0][3] if tiles else ""
    raw = how if isinstance(how, str) else how[0] if how else ""
    return ";16" in str(raw) and image.mode in (*_GREY, *_COLOUR)


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """What makes the picture upright; None where it is."""
    try:
        return _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception as error:  # the parser meets crafted bytes with many kinds of exception
        raise ImageContentError(f"the image's EXIF data cannot be read ({type(error).__name__}); remove it") from None


def _wide_values(image: Image.Image) -> NDArray[np.uint16]:
    wide: NDArray[Any] = np.asarray(image)
    if wide.size and (wide.min() < 0 or wide.max() > WORDS[1]):
        raise ImageContentError(
            f"the image has values from {wide.min()} to {wide.max()}; at most 16 bits (0–65535) are taken"
        )
    if "transparency" in image.info and (wide == image.info["transparency"]).any():
        raise ImageContentError(_TRANSPARENT.format(channels=2))
    return wide.astype(np.uint16)


def _eight_bits(image: Image.Image, wanted: Wanted | None) -> Pixels:
    """An alpha channel that hides nothing may go; one that does would need a background, which is a guess."""
    grey = image.mode in _GREY
    if _ALPHA_BANDS & set(image.getbands()) or "transparency" in image.info:
        layers = np.asarray(image.convert("LA" if grey else "RGBA"), np.uint8)
        if wanted is not None and layers.shape[2] == wanted.shape[0]:
            return layers  # transparency is a channel like any other
        if layers[..., -1].min() < 255:
            raise ImageContentError(_TRANSPARENT.format(channels=layers.shape[2]))
        return layers[..., :-1]
    if wanted is not None and wanted.convert and wanted.shape[0] == 1:
        grey = True
    return np.asarray(image.convert("L" if grey else "RGB"), np.uint8).reshape(image.height, image.width, -1)


def _check_values(pixels: Pixels, wanted: Wanted) -> None:
    found, expected = range_of(pixels), wanted.range
    has, takes = (_BITS.get(span or (), "floats") for span in (found, expected))
    whose = "the model's are" if wanted.convert else "the others' are"
    if found is not None and found != expected:
        raise ImageContentError(f"pixels are {has}, and {whose} {takes}; save all images alike")
    if found is None and expected in _BITS and not wanted.convert:
        raise ImageContentError(f"pixels are {has}, and {whose} {takes}; save all images alike")
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= expected[0] and high <= expected[1]):  # NaN compares false
        raise ImageContentError(f"values from {low:g} to {high:g} are not within {expected[0]:g} to {expected[1]:g}")


def _with_channels(pixels: Pixels, channels: int) -> Pixels:
    found = pixels.shape[2]
    if found == channels:
        return pixels
    if found == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if found == 3 and channels == 1:
        raise ImageContentError("a colour image among grey ones; convert the one or the others")
    raise ImageContentError(f"has {found} channels where {channels} are expected")


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bilinear, channel by channel; 16 bits in float32, rounded back."""
    kind = np.uint8 if pixels.dtype == np.uint8 else np.float32
    planes = [Image.fromarray(np.array(pixels[..., c], kind)) for c in range(pixels.shape[2])]
    scaled = np.stack([np.asarray(plane.resize((width, height), Image.Resampling.BILINEAR)) for plane in planes], 2)
    return np.rint(scaled).astype(np.uint16) if pixels.dtype == np.uint16 else scaled
