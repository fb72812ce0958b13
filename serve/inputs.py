"""Request bodies as arrays of rows × channels × height × width. Whatever does not fit is the caller's to mend."""

import io
import logging
import math
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from fedppd_ray.prediction import Pixels, image_pixels
from serve.errors import RequestError, invalid, malformed
from serve.schemas import Validator

logger = logging.getLogger("fedppd.serve")

JSON, PNG, JPEG, NPY = "application/json", "image/png", "image/jpeg", "application/x-npy"
MEDIA_TYPES = (JSON, PNG, JPEG, NPY)
_FORMATS = {PNG: "PNG", JPEG: "JPEG"}
_NPY_KINDS = {"u1", "f2", "f4", "f8"}
_NPY_HEADER_BYTES = 4096

Shape = tuple[int, int, int]


def decode_json(body: bytes, validator: Validator) -> tuple[Pixels, float | None]:
    """The images and the coverage of `{"instances": […], "coverage": …}`."""
    try:
        request = cast(Any, validator.model_validate_json(body))
    except ValidationError as error:
        raise _refusal(error) from None
    pixels = np.asarray(request.instances, np.float32)
    # Grey images come as H×W, colour as H×W×3; the network takes channels first.
    rows = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return rows, request.coverage


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return malformed("body", first["msg"])
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return invalid(field or "body", first["msg"])


def decode_npy(body: bytes, shape: Shape, max_images: int) -> Pixels:
    """A .npy file of N×H×W[×3] bytes or floats. Never unpickles, and copies nothing that is a byte array."""
    array = _read_npy(body)
    channels, height, width = shape
    wanted = (height, width) if channels == 1 else (height, width, channels)
    if array.shape[1:] != wanted or array.ndim != len(wanted) + 1:
        sizes = "×".join(str(side) for side in array.shape) or "a single number"
        raise invalid("body", f"the array is {sizes}; this model takes N×{'×'.join(map(str, wanted))}")
    check_count("body", len(array), max_images)
    check_range("body", array)
    rows = array[:, None] if channels == 1 else array.transpose(0, 3, 1, 2)
    return rows if array.dtype == np.uint8 else rows.astype(np.float32)


def _read_npy(body: bytes) -> NDArray[Any]:
    stream = io.BytesIO(body)
    try:
        version = npy_format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} is not known")
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=_NPY_HEADER_BYTES)
    except Exception as error:  # the header is a Python literal: crafted ones fail in the parser in many ways
        logger.info("refused an npy body: %s: %s", type(error).__name__, error)
        raise malformed("body", f"is not a readable .npy file ({str(error)[:200]})") from None
    if dtype.hasobject or dtype.str[1:] not in _NPY_KINDS:
        raise invalid("body", f"the array's type is {dtype}; give uint8 or float")
    if any(side < 0 for side in shape):
        raise malformed("body", "the .npy header has a negative size")
    data = memoryview(body)[stream.tell() :]
    # Exact integers: a header may claim more elements than a machine word can count.
    if math.prod(shape) * dtype.itemsize != len(data):
        raise malformed("body", f"the .npy header promises {math.prod(shape)} values, which the body does not hold")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def check_count(field: str, count: int, most: int) -> None:
    if count < 1:
        raise invalid(field, "is empty: give at least one image")
    if count > most:
        raise invalid(field, f"holds {count} images; at most {most} are taken in one request")


def check_range(field: str, array: NDArray[Any]) -> None:
    """Pixel values are finite and within 0–255."""
    if array.dtype == np.uint8:
        return
    low, high = array.min(), array.max()
    # NaN compares false with everything, so this refuses it too.
    if not (low >= 0 and high <= 255):
        found = "not a number" if np.isnan(low) or np.isnan(high) else f"from {low:g} to {high:g}"
        raise invalid(field, f"pixel values are {found}; they must be within 0–255")


def open_image(body: bytes, media_type: str, max_pixels: int) -> Image.Image:
    """Reads the header alone: the caller knows the size before any pixel is decompressed."""
    try:
        image = Image.open(io.BytesIO(body), formats=[_FORMATS[media_type]])
    except Image.DecompressionBombError:
        raise _too_many_pixels("far more", max_pixels) from None
    except Exception as error:  # decoders meet crafted bytes with any exception there is
        raise _broken(media_type, error) from None
    if image.width * image.height > max_pixels:
        raise _too_many_pixels(f"{image.width}×{image.height}", max_pixels)
    return image


def decode_image(image: Image.Image, media_type: str, shape: Shape) -> Pixels:
    """One row, greyed or coloured and resized to the model's input."""
    try:
        with image:
            return image_pixels(image, *shape)[None]
    except Exception as error:  # as above: a broken scan line shows only now
        raise _broken(media_type, error) from None


def _too_many_pixels(found: str, most: int) -> RequestError:
    return RequestError(413, "image_too_large", "body", f"the image has {found} pixels; at most {most:,} are decoded")


def _broken(media_type: str, error: Exception) -> RequestError:
    logger.info("refused a %s body: %s: %s", media_type, type(error).__name__, error)
    return malformed("body", f"is not a readable {_FORMATS[media_type]} image")
