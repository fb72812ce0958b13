"""Predictions for image files with a run's exported student, without a server."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedppd_ray.checkpoint.export import read_student
from fedppd_ray.data.batches import normalisation
from fedppd_ray.data.catalog import CATALOG
from fedppd_ray.data.datasets import load, load_ood
from fedppd_ray.errors import ConfigError, DataError
from fedppd_ray.evaluation.metrics import Floats, entropy
from fedppd_ray.evaluation.predictive import network_predictor


def predict_files(run: Path, images: list[Path]) -> list[dict[str, Any]]:
    card, student = read_student(run)
    size = card["input"]
    pixels = np.stack([read_image(path, size["channels"], size["height"], size["width"]) for path in images])
    scale, shift = normalisation(card["normalisation"]["mean"], card["normalisation"]["std"])
    inputs = torch.addcmul(shift, torch.from_numpy(pixels).float(), scale)
    log_probabilities = network_predictor(student)(inputs).numpy()
    answers = describe_predictions(card, log_probabilities)
    return [{"image": str(path), **answer} for path, answer in zip(images, answers, strict=True)]


def describe_predictions(card: dict[str, Any], log_probabilities: Floats) -> list[dict[str, Any]]:
    """label, class_name, probabilities, entropy, normalized_entropy and abstain for each row."""
    threshold = card["abstention"]["threshold"] if card["abstention"] else math.inf
    answers = []
    for row, uncertainty in zip(log_probabilities, entropy(log_probabilities), strict=True):
        label = int(row.argmax())
        answers.append(
            {
                "label": label,
                "class_name": card["classes"][label],
                "probabilities": np.exp(row).tolist(),
                "entropy": float(uncertainty),
                "normalized_entropy": float(uncertainty / math.log(len(row))),
                "abstain": bool(uncertainty > threshold),
            }
        )
    return answers


def read_image(path: Path, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """An image file as channels × height × width, greyed and resized to the model's input."""
    try:
        with Image.open(path) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such image file") from None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path}: cannot be read as an image ({error}); give a PNG or JPEG file") from None
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def write_sample(name: str, index: int, path: Path, root: str | None) -> str:
    """Write a held-out image of a data set as PNG; returns what it shows."""
    if name not in CATALOG:
        raise ConfigError(f"{name}: unknown data set; choose one of {', '.join(CATALOG)}")
    info = CATALOG[name]
    if info.adapts:
        pixels, shows = load_ood(name, info, rows=index + 1)[index], "out of distribution"
    else:
        test = load(name, root).test
        if index >= len(test):
            raise DataError(f"--index {index}: {name} has {len(test)} held-out rows")
        pixels, shows = test.images[index], f"class {info.classes[test.labels[index]]}"
    picture = np.asarray(pixels[0] if info.shape[0] == 1 else pixels.transpose(1, 2, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path, format="PNG")
    return shows
