"""One file of a user's own data as numbers; `data.pixels` says how each kind of picture is treated.

PNG, JPEG and TIFF by Pillow, .npy arrays (H×W or H×W×C), DICOM by pydicom.
"""

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedppd_ray.data.pixels import ImageContentError, Pixels, Wanted, fit, picture, range_of
from fedppd_ray.errors import DataError

PICTURES, ARRAY, DICOM = (".png", ".jpg", ".jpeg", ".tif", ".tiff"), ".npy", ".dcm"
SUFFIXES = (*PICTURES, ARRAY, DICOM)


def decode(path: Path, wanted: Wanted) -> NDArray[Any]:
    """Channels × height × width of a file, in the type of its range."""
    try:
        return fit(_read(path, wanted), wanted)
    except ImageContentError as error:
        raise DataError(f"{path}: {error}") from None


def look(path: Path) -> tuple[tuple[int, int, int], tuple[float, float] | None]:
    """Channels, height and width of a file, and its range of values; None where the file cannot know it (floats)."""
    pixels = _read(path, None)
    return (pixels.shape[2], *pixels.shape[:2]), range_of(pixels)


def _read(path: Path, wanted: Wanted | None) -> Pixels:
    suffix = path.suffix.lower()
    if suffix == ARRAY:
        return _array(path)
    if suffix == DICOM:
        return read_dicom(path, str(path))
    try:
        with Image.open(path) as image:
            return picture(image, wanted)
    except ImageContentError as error:
        raise DataError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such image file") from None
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from None


def _array(path: Path) -> Pixels:
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as an array ({error})") from None
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in (np.uint8, np.uint16, np.float32) or array.ndim not in (2, 3) or array.size == 0:
        raise DataError(f"{path}: {array.dtype} {array.shape} is not uint8, uint16 or float32 of H×W or H×W×C")
    return array[..., None] if array.ndim == 2 else array


def read_dicom(source: Path | io.BytesIO, path: str) -> Pixels:
    """Rescaled to the modality's units and windowed, in [0, 1]; MONOCHROME1 (white is low) is turned round."""
    if importlib.util.find_spec("pydicom") is None:
        raise DataError(
            f"{path}: DICOM is read by pydicom; pip install 'fedppd-ray[dicom]', or convert it to 16-bit PNG"
        )
    import pydicom
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    try:
        data = pydicom.dcmread(source)
        pixels = data.pixel_array
        if pixels.ndim != 2:
            raise ValueError(f"{pixels.shape}: only single grey frames are read")
        rescaled = apply_modality_lut(pixels, data)
        windowed = np.asarray(apply_voi_lut(rescaled, data), np.float64)
    except Exception as error:  # the format is outside data, and its reader raises whatever it likes
        raise DataError(f"{path}: cannot be read as DICOM ({' '.join(str(error).split())[:200]})") from None
    low, high = _dicom_range(data, np.asarray(rescaled, np.float64))
    unit = np.clip((windowed - low) / (high - low), 0, 1)
    return (1 - unit if data.PhotometricInterpretation == "MONOCHROME1" else unit).astype(np.float32)[..., None]


def _dicom_range(data: Any, rescaled: NDArray[np.float64]) -> tuple[float, float]:
    """What a window, or the stored bits without one, spans after rescaling."""
    slope, intercept = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
    bits, signed = int(data.BitsStored), bool(data.PixelRepresentation)
    stored: Sequence[int] = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    ends = sorted(value * slope + intercept for value in stored)
    return (ends[0], ends[1]) if ends[1] > ends[0] else (float(rescaled.min()), float(rescaled.max()) + 1)
