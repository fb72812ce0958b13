"""Bodies of images as arrays of rows × channels × height × width. Whatever does not fit is the caller's to mend."""

import io
import logging
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from fedppd_ray.data.parts import RawRows
from fedppd_ray.data.pixels import ImageContentError, Pixels, fit, picture, to_predict
from fedppd_ray.data.readers.pixels import read_dicom
from fedppd_ray.errors import DataError
from serve.npy import read_npy
from serve.refusals import RequestError, image_too_large, invalid, malformed
from serve.schemas import Validator
from serve.structure import JPEG, NAMES, PNG, examine
from serve.takes import ImageInput

logger = logging.getLogger("fedppd.serve")

JSON, NPY, CSV = "application/json", "application/x-npy", "text/csv"
TIFF, DICOM = "image/tiff", "application/dicom"
IMAGES = (PNG, JPEG, TIFF, DICOM)
MEDIA_TYPES = (JSON, *IMAGES, NPY, CSV)
# JSON up to this size, with no more strings than its keys need, is parsed in a millisecond, whatever it holds.
BRIEF_BYTES, _BRIEF_QUOTES = 24 * 1024, 8
# The same for checking the range of that many bytes of floats, and making them float32.
BRIEF_ARRAY_BYTES = 64 * 1024

Body = bytes | bytearray


class Asked(NamedTuple):
    """What a request asks for besides predictions; None: the export's default, no sets."""

    coverage: float | None = None
    confidence: float | None = None


NOTHING = Asked()


def is_brief_json(body: Body, quotes: int = _BRIEF_QUOTES) -> bool:
    return len(body) <= BRIEF_BYTES and body.count(b'"') <= quotes


def decode_json(body: Body, validator: Validator) -> tuple[RawRows, Asked]:
    """The images of `{"instances": […], "coverage": …, "confidence": …}`, and what else it asks for."""
    try:
        request = cast(Any, validator.model_validate_json(body))
    except ValidationError as error:
        raise refusal(error) from None
    pixels = np.asarray(request.instances, np.float32)
    # Grey images come as H×W, others as H×W×C; the network takes channels first.
    rows = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return rows, Asked(request.coverage, request.confidence)


def refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return malformed("body", first["msg"])
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return invalid(field or "body", first["msg"])


def open_npy(body: Body, sides: tuple[int, ...], max_rows: int) -> NDArray[Any]:
    """The array of a .npy file, N×`sides` integers or floats, checked but for its values."""
    array = read_npy(body)
    if array.shape[1:] != sides or array.ndim != len(sides) + 1:
        sizes = "×".join(str(side) for side in array.shape) or "a single number"
        raise invalid("body", f"the array is {sizes[:100]}; this model takes N×{'×'.join(map(str, sides))}")
    check_count("body", len(array), max_rows)
    return array


def checked_pixels(field: str, array: NDArray[Any], takes: ImageInput) -> RawRows:
    """Rows with values in the model's range as the network takes them, of an array N×H×W[×C]. Bytes are not copied."""
    check_range(field, array, takes)
    rows = array[:, None] if takes.shape[0] == 1 else array.transpose(0, 3, 1, 2)
    return rows if array.dtype == np.uint8 else rows.astype(np.float32)


def check_count(field: str, count: int, most: int, what: str = "image") -> None:
    if count < 1:
        raise invalid(field, f"is empty: give at least one {what}")
    if count > most:
        raise invalid(field, f"holds {count} {what}s; at most {most} are taken in one request")


def check_range(field: str, array: NDArray[Any], takes: ImageInput) -> None:
    """Pixel values are finite and within the model's range."""
    least, largest = takes.range
    if array.dtype.kind == "u" and least <= 0 and np.iinfo(array.dtype).max <= largest:
        return
    low, high = array.min(), array.max()
    # NaN compares false with everything, so this refuses it too.
    if not (low >= least and high <= largest):
        found = "not a number" if np.isnan(low) or np.isnan(high) else f"from {low:g} to {high:g}"
        raise invalid(field, f"pixel values are {found}; they must be within {takes.bounds}")


def decode_image(body: Body, media_type: str, takes: ImageInput, max_pixels: int) -> RawRows:
    """One row, as `fedppd predict` would show it to the model. Only for decoder processes: it may take its time."""
    if media_type in NAMES:
        examine(body, media_type, max_pixels)
    wanted = to_predict(takes.shape, takes.range)
    try:
        pixels = _dicom(body) if media_type == DICOM else _picture(body, media_type, takes, max_pixels)
        row = fit(pixels, wanted)
    except ImageContentError as error:
        raise invalid("body", str(error)) from None
    except (MemoryError, RequestError):
        raise
    except Exception as error:  # decoders meet crafted bytes with any exception there is
        logger.info("refused a %s body: %s: %s", media_type, type(error).__name__, error)
        kind = media_type.rpartition("/")[2].upper()
        raise malformed("body", f"is not a readable {kind} image") from None
    return row[None] if row.dtype == np.uint8 else row[None].astype(np.float32)


def _picture(body: Body, media_type: str, takes: ImageInput, max_pixels: int) -> Pixels:
    with Image.open(io.BytesIO(body), formats=[NAMES.get(media_type, "TIFF")]) as image:
        if image.width * image.height > max_pixels:  # of TIFF this is not known before
            raise image_too_large(
                f"the image has {image.width}×{image.height} pixels; at most {max_pixels:,} are decoded"
            )
        return picture(image, to_predict(takes.shape, takes.range))


def _dicom(body: Body) -> Pixels:
    try:
        return read_dicom(io.BytesIO(body), "body")
    except DataError as error:
        raise invalid("body", str(error).removeprefix("body: ")) from None
