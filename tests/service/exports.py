"""Exported students for the tests, made by the real code: a network trained for seconds, calibrated, exported."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedppd_ray.config.file import parse_config
from fedppd_ray.config.schema import Config
from fedppd_ray.data.datasets import load
from fedppd_ray.data.holdings import partition_of
from fedppd_ray.data.rows import ImageShard
from fedppd_ray.evaluation.calibration import calibrate
from fedppd_ray.evaluation.metrics import metrics_of
from fedppd_ray.inference.held_out import HeldOut
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.models.networks import build_network, initialise, seed_dropout
from fedppd_ray.runs.export import export_student, read_student
from fedppd_ray.runs.store import RunStore

DIGITS: dict[str, Any] = {
    "name": "digits",
    "data": {"name": "mnist5k", "calibration": 400, "partition": {"kind": "iid"}},
    "federation": {"clients": 2},
}


def trained_digits(run: Path, seed: int = 1) -> None:
    """A run folder with a student that knows its digits, trained in one place to save the tests' time."""
    torch.manual_seed(0)
    config = parse_config(DIGITS)
    held_out = HeldOut(config)
    data = load("mnist5k", None)
    # Calibration rows stay out, as they do in a federated run.
    kept = np.setdiff1d(np.arange(len(data.train)), partition_of(config, data.train).calibration)
    shard = ImageShard(data.train.images[kept], np.asarray(data.train.labels[kept]), data.info)
    generator = torch.Generator().manual_seed(seed)
    model = FlatModel(build_network("mnist_student", data.info.shape, 10))
    initialise(model.module, generator)
    seed_dropout(model.module, generator)
    model.module.train()
    velocity = torch.zeros_like(model.weights)
    labels = torch.as_tensor(shard.labels)
    for epoch in range(5):
        for inputs, rows in shard.batches(50, generator):
            loss = torch.nn.functional.cross_entropy(model.module(inputs), labels[rows])
            velocity.mul_(0.9).add_(model.backward(loss))
            with torch.no_grad():
                model.weights.add_(velocity, alpha=-0.02 * 0.6**epoch)
    RunStore(run).create(config)
    export(run, config, model, 1, held_out)


def export(run: Path, config: Config, model: FlatModel, round_id: int, held_out: HeldOut) -> None:
    predict = network_predictor(model)
    known, labels = held_out.outputs(predict, "calibration"), held_out.labels("calibration")
    found = calibrate(config.evaluation, known, labels, lambda: known, config.dataset.classes)
    scores = metrics_of(held_out.log_probabilities(predict, "test"), held_out.labels("test")).as_dict()
    export_student(run, config, round_id, model, scores, found.abstention, found.entry())


def untrained_colour(run: Path) -> None:
    """A colour model without calibration: all that input handling needs."""
    config = parse_config({"name": "colours", "data": {"name": "cifar10", "calibration": 0}})
    model = FlatModel(build_network("cifar10_student", (3, 32, 32), 10))
    initialise(model.module, torch.Generator().manual_seed(0))
    run.mkdir(parents=True)
    export_student(run, config, 3, model, {"accuracy": 10.0}, None)


def untrained_scans(run: Path, shape: tuple[int, int, int], span: tuple[float, float]) -> None:
    """A model of images of any size, channels and range, without calibration."""
    level = [0.5] * shape[0]
    facts = {"classes": ["clear", "dense"], "shape": shape, "mean": level, "std": level, "range": span}
    data = {"name": "folder", "folder": facts, "partition": {"kind": "iid"}}
    config = parse_config({"name": "scans", "data": data, "evaluation": {"ood": None}})
    model = FlatModel(build_network("small_student", shape, 2))
    initialise(model.module, torch.Generator().manual_seed(0))
    run.mkdir(parents=True)
    export_student(run, config, 1, model, {"accuracy": 50.0}, None)


COLUMNS = [
    {"name": "age", "kind": "numeric", "mean": 60.0, "std": 12.0, "low": 20.0, "high": 95.0},
    {"name": "ward", "kind": "categorical", "categories": ["a", "b, c"]},
    {"name": "lab", "kind": "numeric", "mean": 5.0, "std": 1.0, "low": 2.0, "high": 9.0, "missing": True},
]


def untrained_table(run: Path, columns: list[dict[str, Any]] = COLUMNS) -> None:
    """A model of patients, without calibration."""
    table = {"target": "outcome", "classes": ["ill", "well"], "columns": columns}
    data = {"name": "table", "table": table, "partition": {"kind": "iid"}}
    config = parse_config({"name": "patients", "data": data, "evaluation": {"ood": None}})
    model = FlatModel(build_network("mlp_student", config.dataset.shape, 2))
    initialise(model.module, torch.Generator().manual_seed(0))
    run.mkdir(parents=True)
    export_student(run, config, 1, model, {"accuracy": 50.0}, None)


def export_again(run: Path, round_id: int) -> str:
    """A new version of the student in `run`, as the next round's export would make it; returns its version."""
    card, model = read_student(run)
    with torch.no_grad():
        model.weights.mul_(1 + 1e-4)
    config = RunStore(run).config()
    export_student(run, config, round_id, model, card["metrics"], card["abstention"], calibration_of(card))
    return str(read_student(run)[0]["version"])


def calibration_of(card: dict[str, Any]) -> dict[str, Any]:
    return {key: card[key] for key in ("temperature", "score", "conformal", "ood", "drift") if key in card}


def miscalibrated(run: Path, round_id: int) -> None:
    """The same labels as before, far too little confidence: the last layer by a fifth, the calibration of before."""
    card, model = read_student(run)
    last = [part for part in model.module.modules() if isinstance(part, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(0.2)
        last.bias.mul_(0.2)
    # Calibrated anew, the temperature would mend it.
    config = RunStore(run).config()
    export_student(run, config, round_id, model, card["metrics"], card["abstention"], calibration_of(card))
