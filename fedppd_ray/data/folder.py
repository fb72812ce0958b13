"""The data set that users bring: DIR/{train,test}, and DIR/clients/<id> where each client has rows of its own.

Each of those folders is either a pair of arrays, `images.npy` (uint8, uint16 or float32, N×H×W or N×H×W×C) and
`labels.npy` (integers), or image files, <class>/*.png|jpg|tif|npy|dcm. DIR/dataset.json says what the files cannot: it
must name the classes of arrays and the range of floats, and may give shape, mean, std and networks, which are otherwise
measured or chosen.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppd_ray.config.nouns import FOLDER, DatasetInfo, Shape
from fedppd_ray.data import cache
from fedppd_ray.data.catalog import networks_for
from fedppd_ray.data.parts import BYTES, Split, Values
from fedppd_ray.data.pixels import UNIT, WORDS, Wanted, range_of
from fedppd_ray.data.readers import images as image_files
from fedppd_ray.data.readers.pixels import DICOM, look
from fedppd_ray.errors import DataError

FACTS = "dataset.json"
_KEYS = {"classes", "shape", "mean", "std", "range", "networks"}
_CHUNK = 4096


def client_folders(root: Path) -> list[str]:
    """The names in DIR/clients, sorted: who has a folder there."""
    return image_files.class_names(root / "clients")


def describe_folder(root: Path, resize: Sequence[int] | None = None, skip_bad: bool = False) -> DatasetInfo:
    """The facts of a user's data set, from dataset.json and from the files themselves."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; set data.root to the folder that holds train/ and test/")
    places = [root / "train", *(root / "clients" / name for name in client_folders(root))]
    places = [place for place in places if place.is_dir()]
    if not places or not (root / "test").is_dir():
        raise DataError(f"{root}: has no {'test' if places else 'train'} folder; see docs/data.md for the layouts")
    facts = facts_file(root)
    classes = tuple(facts.get("classes") or _class_names(root, [*places, root / "test"]))
    shape, span = look_at(places[0], facts, skip_bad)
    if resize is not None:
        shape = (shape[0], *resize)
    info = DatasetInfo(FOLDER, classes, shape, (0.0,) * shape[0], (1.0,) * shape[0], "none")
    info = replace(info, range=span, resize=resize is not None, skip_bad_files=skip_bad)
    mean, std = facts.get("mean"), facts.get("std")
    if mean is None or std is None:
        measured = measure((read_folder(place, info).images for place in places), span)
        mean, std = mean or measured[0], std or measured[1]
    return replace(
        info,
        mean=mean,
        std=std,
        networks=facts.get("networks") or networks_for(shape),
        writers=(root / "train" / "writers.npy").exists(),
    )


def folder_facts(root: Path, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts as `data.folder` of a configuration holds them."""
    given = data or {}
    info = describe_folder(root, given.get("resize"), bool(given.get("skip_bad_files")))
    return {
        "classes": info.classes,
        "shape": info.shape,
        "mean": info.mean,
        "std": info.std,
        "range": info.range,
        "networks": info.networks,
        "writers": info.writers,
    }


def write_folder(out: Path, info: DatasetInfo, train: Split, test: Split) -> None:
    """A data set in the layout of arrays, which `data.name: folder` reads back."""
    for name, split in (("train", train), ("test", test)):
        (out / name).mkdir(parents=True, exist_ok=True)
        rows = split.images.transpose(0, 2, 3, 1)
        np.save(out / name / "images.npy", np.ascontiguousarray(rows[..., 0] if info.shape[0] == 1 else rows))
        np.save(out / name / "labels.npy", split.labels)
        if split.writers is not None:
            np.save(out / name / "writers.npy", split.writers)
    facts = {
        "classes": info.classes,
        "shape": info.shape,
        "mean": info.mean,
        "std": info.std,
        "networks": {role: info.network(role) for role in ("teacher", "student")},
    }
    (out / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(parts: Iterable[Values], span: tuple[float, float] = BYTES) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels in [0, 1]. Counted, so that no order of sums matters."""
    if span != BYTES:
        return _measure_sums(parts, span)
    counts: NDArray[np.int64] | None = None
    for images in parts:
        for start in range(0, len(images), _CHUNK):
            piece = images[start : start + _CHUNK]
            found = np.stack([np.bincount(piece[:, c].reshape(-1), minlength=256) for c in range(piece.shape[1])])
            counts = found if counts is None else counts + found
    if counts is None:
        raise ValueError("no images to measure")
    levels, shares = np.arange(256) / 255, counts / counts.sum(axis=1, keepdims=True)
    return rounded(shares @ levels, shares @ levels**2)


def _measure_sums(parts: Iterable[Values], span: tuple[float, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The same of 16 bits and floats, which are too many to count."""
    rows, totals = 0, None
    for images in parts:
        for start in range(0, len(images), _CHUNK):
            unit = (np.asarray(images[start : start + _CHUNK], np.float64) - span[0]) / (span[1] - span[0])
            found = np.stack([unit.mean(axis=(2, 3)).sum(axis=0), (unit**2).mean(axis=(2, 3)).sum(axis=0)])
            totals = found if totals is None else totals + found
            rows += len(unit)
    if totals is None:
        raise ValueError("no images to measure")
    return rounded(*(totals / rows))


def rounded(mean: NDArray[np.float64], squares: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    std = np.sqrt(np.maximum(squares - mean**2, 0))
    # Images of one colour have no deviation to divide by.
    return tuple(np.round(mean, 6).tolist()), tuple(np.round(np.where(std < 1e-6, 1, std), 6).tolist())


def read_folder(folder: Path, info: DatasetInfo) -> Split:
    """The rows of one folder: arrays are mapped where they lie, image files parsed into the cache once."""
    folder = folder.expanduser().absolute()
    paths = [] if _has_arrays(folder) else image_files.files(folder)
    if not paths:
        return _read_arrays(folder, info)
    facts = cache.digest(f"{'/'.join(info.classes)} {info.shape} {info.range} {info.resize} {info.skip_bad_files}")
    wanted = Wanted(info.shape, info.range, info.resize)
    place = cache.entry(f"{FOLDER}-{facts}", folder, paths)
    cache.fill(place, lambda: image_files.read(folder, info.classes, wanted, info.skip_bad_files))
    return cache.read(place)


def _has_arrays(folder: Path) -> bool:
    return (folder / "images.npy").exists()


def _read_arrays(folder: Path, info: DatasetInfo) -> Split:
    images, labels = (_mapped(folder, name) for name in ("images.npy", "labels.npy"))
    channels, height, width = info.shape
    shape = (height, width) if channels == 1 and images.ndim == 3 else (height, width, channels)
    kind = {BYTES: "uint8", WORDS: "uint16"}.get(info.range, "float32")
    if str(images.dtype) != kind or images.shape[1:] != shape or len(images) == 0:
        raise DataError(
            f"{folder}/images.npy: {images.dtype} {images.shape}, expected {kind} N×{'×'.join(map(str, shape))} as the "
            f"others'; convert it"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(f"{folder}/labels.npy: {labels.dtype} {labels.shape}, expected {len(images)} integers")
    if labels.min() < 0 or labels.max() >= len(info.classes):
        row = int(np.flatnonzero((labels < 0) | (labels >= len(info.classes)))[0])
        raise DataError(
            f"{folder}/labels.npy: labels must be 0 to {len(info.classes) - 1}, and row {row} has {labels[row]}; mend "
            f"it, or name its class in dataset.json"
        )
    pixels = images.reshape(len(images), height, width, channels).transpose(0, 3, 1, 2)
    return Split(pixels, labels.astype(np.int64), _writers(folder, len(images)))


def _writers(folder: Path, rows: int) -> NDArray[np.int64] | None:
    if not (folder / "writers.npy").exists():
        return None
    writers = _mapped(folder, "writers.npy")
    if writers.shape != (rows,) or writers.dtype.kind not in "iu":
        raise DataError(f"{folder}/writers.npy: {writers.dtype} {writers.shape}, expected {rows} integers")
    return writers.astype(np.int64)


def _mapped(folder: Path, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{folder}: images.npy and labels.npy cannot be read here ({error}), and there are no image files "
            f"<class>/*.png"
        ) from None
    return array


def class_names_of(folder: Path) -> list[str]:
    """The classes of a client's own folder: by the names of the folders in it."""
    if _has_arrays(folder):
        raise DataError(f'{folder / FACTS}: arrays need it to name the classes, as {{"classes": ["cat", "dog"]}}')
    return image_files.class_names(folder)


def _class_names(root: Path, places: list[Path]) -> list[str]:
    if any(_has_arrays(place) for place in places):
        raise DataError(f'{root / FACTS}: arrays need it to name the classes, as {{"classes": ["cat", "dog"]}}')
    names = sorted({name for place in places for name in image_files.class_names(place)})
    if len(names) < 2:
        raise DataError(f"{places[0]}: holds {len(names)} class folders, of two or more")
    return names


def look_at(folder: Path, facts: Mapping[str, Any], skip_bad: bool) -> tuple[Shape, tuple[float, float]]:
    """Channels, height, width and the range of values, of the first file or of the array."""
    shape, span = _shape_of(folder, skip_bad)
    stated = facts.get("range")
    if span is None and stated is None and not _has_arrays(folder) and _is_dicom(folder):
        span = UNIT
    if span is None and stated is None:
        raise DataError(f'{folder.parent / FACTS}: float images need it to state their range, as {{"range": [0, 1]}}')
    return tuple(facts.get("shape") or shape), tuple(stated or span or BYTES)


def _is_dicom(folder: Path) -> bool:
    return all(path.suffix.lower() == DICOM for path in image_files.files(folder))


def _shape_of(folder: Path, skip_bad: bool) -> tuple[Shape, tuple[float, float] | None]:
    if _has_arrays(folder):
        images = _mapped(folder, "images.npy")
        if images.ndim not in (3, 4):
            raise DataError(f"{folder}/images.npy: {images.dtype} {images.shape}, expected uint8 N×H×W or N×H×W×C")
        height, width, *channels = images.shape[1:]
        return (channels[0] if channels else 1, height, width), range_of(images)
    paths = image_files.files(folder)
    if not paths:
        raise DataError(f"{folder}: has neither images.npy nor image files <class>/*.png")
    for path in paths:
        try:
            return look(path)
        except DataError:
            if not skip_bad:
                raise
    raise DataError(f"{folder}: none of its files can be read as an image")


def facts_file(root: Path) -> dict[str, Any]:
    """dataset.json with lists as tuples; {} where there is none."""
    path = root / FACTS
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        unknown = set(content) - _KEYS
        facts = {key: tuple(value) for key, value in content.items() if key in _KEYS - {"networks"}}
        if "networks" in content:
            facts["networks"] = tuple(content["networks"][role] for role in ("teacher", "student"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: is not of the form {{classes, shape, mean, std, networks}} ({error!r})") from None
    if unknown:
        raise DataError(f"{path}: unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(_KEYS))}")
    if "shape" in facts and (len(facts["shape"]) != 3 or not all(isinstance(side, int) for side in facts["shape"])):
        raise DataError(f"{path}: shape must be three numbers: channels, height, width")
    return facts
