"""Single pictures: files as rows of the shape that a network takes, and rows as files."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedppd_ray.config.nouns import DATASETS, FOLDER, Shape
from fedppd_ray.config.table import SHIFTED
from fedppd_ray.data.datasets import dataset_info, load, load_ood
from fedppd_ray.data.pixels import hint_for, to_predict
from fedppd_ray.data.readers import tables
from fedppd_ray.data.readers.pixels import SUFFIXES, decode
from fedppd_ray.data.shapes import as_bytes
from fedppd_ray.errors import ConfigError, DataError

log = logging.getLogger(__name__)

PICTURES, TABLES = tuple(sorted(SUFFIXES)), tables.SUFFIXES  # what `predict` looks for in a folder


def picture_rows(paths: Sequence[Path], shape: Shape, span: tuple[float, float]) -> NDArray[Any]:
    """Files as rows to predict: treated as the service does, and but for size, colour and 16 bits as training does."""
    wanted = to_predict(shape, span)
    try:
        rows = [decode(path, wanted) for path in paths]
    except DataError as error:
        raise ConfigError(str(error)) from None
    for path, row in zip(paths, rows, strict=True):
        if hint := hint_for(row, span):
            log.warning("%s: %s", path, hint)
    return np.stack(rows)


def found_files(paths: Sequence[Path | str], suffixes: Sequence[str]) -> list[Path]:
    """These files, and in the place of a folder every file of a known kind below it, sorted by name."""
    found: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            found.append(given)
            continue
        below = sorted(path for path in given.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
        if not below:
            raise ConfigError(f"{given}: holds no file of {', '.join(suffixes)}; give files, or another folder")
        found += below
    return found


def write_sample(name: str, index: int, path: Path, root: str | None) -> str:
    """Write a held-out image of a data set as PNG; returns what it shows."""
    if name not in (*DATASETS, FOLDER):
        raise ConfigError(f"{name}: unknown data set; choose one of {', '.join([*DATASETS, FOLDER])}")
    if name == SHIFTED:
        raise ConfigError(f"{name}: its rows are of a table and no image; choose another data set")
    info = DATASETS[name] if name in DATASETS else dataset_info(name, root)
    if info.adapts:
        images = load_ood(name, info, root, rows=index + 1)
        if index >= len(images):
            raise DataError(f"--index {index}: {name} has {len(images)} rows")
        pixels, shows = images[index], "out of distribution"
    else:
        test = load(name, root, info).test
        if index >= len(test):
            raise DataError(f"--index {index}: {name} has {len(test)} held-out rows")
        pixels, shows = test.images[index], f"class {info.classes[test.labels[index]]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    _picture(pixels).save(path, format="PNG")
    return shows


def picture_bytes(row: NDArray[Any], span: tuple[float, float]) -> bytes:
    """A row as a PNG of 8 bits, for people to look at; of two or more than four channels the first alone."""
    channels = as_bytes(np.asarray(row), span)
    buffer = io.BytesIO()
    _picture(channels if len(channels) in (1, 3, 4) else channels[:1]).save(buffer, format="PNG")
    return buffer.getvalue()


def _picture(row: NDArray[Any]) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(row[0] if len(row) == 1 else row.transpose(1, 2, 0)))
