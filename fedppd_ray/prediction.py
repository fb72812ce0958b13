"""Predictions for image files with a run's exported student, without a server."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedppd_ray.checkpoint.export import read_student
from fedppd_ray.checkpoint.remote import Location
from fedppd_ray.data.batches import normalisation
from fedppd_ray.data.catalog import CATALOG, FOLDER
from fedppd_ray.data.datasets import dataset_info, load, load_ood
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.evaluation.metrics import Floats, entropy
from fedppd_ray.evaluation.predictive import BATCH, network_predictor
from fedppd_ray.models.flat import FlatModel

# Raw pixel values, 0–255, as in the training images.
Pixels = NDArray[np.uint8] | NDArray[np.float32]


class Student:
    """An exported student: pixel values in, float64 log-probabilities out. What `evaluate` computes, row by row."""

    def __init__(self, card: dict[str, Any], model: FlatModel) -> None:
        self.card = card
        size = card["input"]
        self.shape: tuple[int, int, int] = (size["channels"], size["height"], size["width"])
        self._predict = network_predictor(model)
        self._scale, self._shift = normalisation(card["normalisation"]["mean"], card["normalisation"]["std"])

    @classmethod
    def load(cls, run: Location) -> "Student":
        return cls(*read_student(run))

    def log_probabilities(self, pixels: Pixels) -> Floats:
        """One forward pass, `BATCH` rows at a time, over rows × channels × height × width values of 0–255."""
        # A copy, because the rows may be a read-only view of a request's body, which torch cannot wrap; channels
        # last, however they came, as evaluation has them: another layout may change the last bit.
        rows = torch.from_numpy(np.array(pixels.transpose(0, 2, 3, 1), order="C")).permute(0, 3, 1, 2)
        pieces = [
            self._predict(torch.addcmul(self._shift, part.float(), self._scale)).numpy() for part in rows.split(BATCH)
        ]
        return np.concatenate(pieces)


def predict_files(run: Location, images: list[Path]) -> list[dict[str, Any]]:
    student = Student.load(run)
    pixels = np.stack([read_image(path, *student.shape) for path in images])
    answers = describe_predictions(student.card, student.log_probabilities(pixels))
    return [{"image": str(path), **answer} for path, answer in zip(images, answers, strict=True)]


def describe_predictions(
    card: dict[str, Any], log_probabilities: Floats, coverage: float | None = None
) -> list[dict[str, Any]]:
    """label, class_name, probabilities, entropy, normalized_entropy and abstain for each row.

    `coverage` asks for another share of answered rows than the export's default.
    """
    level = abstention_level(card, coverage)
    threshold = level["threshold"] if level else math.inf
    classes = card["classes"]
    uncertainty = entropy(log_probabilities)
    # Whole arrays first, then one pass over plain Python numbers: a large batch spends its time in the network.
    columns = (
        log_probabilities.argmax(axis=1).tolist(),
        np.exp(log_probabilities).tolist(),
        uncertainty.tolist(),
        np.clip(uncertainty / math.log(len(classes)), 0.0, 1.0).tolist(),
        (uncertainty > threshold).tolist(),
    )
    return [
        {
            "label": label,
            "class_name": classes[label],
            "probabilities": probabilities,
            "entropy": nats,
            "normalized_entropy": share,
            "abstain": abstain,
        }
        for label, probabilities, nats, share, abstain in zip(*columns, strict=True)
    ]


def abstention_level(card: dict[str, Any], coverage: float | None = None) -> dict[str, float] | None:
    """The coverage and entropy threshold in force: the export's default, or the table's nearest level that answers
    at least the share `coverage`. None where the export was not calibrated."""
    calibration = card["abstention"]
    if not calibration:
        if coverage is not None:
            raise ConfigError("coverage: this student was exported without calibration rows, so it never abstains")
        return None
    if coverage is None:
        return {"coverage": calibration["coverage"], "threshold": calibration["threshold"]}
    if not 0 < coverage <= 1:
        raise ConfigError(f"coverage: {coverage:g} is not a share above 0 and at most 1")
    row = min((row for row in calibration["table"] if row["coverage"] >= coverage), key=lambda row: row["coverage"])
    return {"coverage": row["coverage"], "threshold": row["threshold"]}


def read_image(path: Path, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """An image file as channels × height × width, greyed and resized to the model's input."""
    try:
        with Image.open(path) as image:
            return image_pixels(image, channels, height, width)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such image file") from None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path}: cannot be read as an image ({error}); give a PNG or JPEG file") from None


def image_pixels(image: Image.Image, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """A picture as channels × height × width, greyed and resized to the model's input."""
    converted = image.convert("L" if channels == 1 else "RGB")
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def write_sample(name: str, index: int, path: Path, root: str | None) -> str:
    """Write a held-out image of a data set as PNG; returns what it shows."""
    if name not in (*CATALOG, FOLDER):
        raise ConfigError(f"{name}: unknown data set; choose one of {', '.join([*CATALOG, FOLDER])}")
    info = CATALOG[name] if name in CATALOG else dataset_info(name, root)
    if info.adapts:
        pixels, shows = load_ood(name, info, rows=index + 1)[index], "out of distribution"
    else:
        test = load(name, root, info).test
        if index >= len(test):
            raise DataError(f"--index {index}: {name} has {len(test)} held-out rows")
        pixels, shows = test.images[index], f"class {info.classes[test.labels[index]]}"
    picture = np.asarray(pixels[0] if info.shape[0] == 1 else pixels.transpose(1, 2, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path, format="PNG")
    return shows
