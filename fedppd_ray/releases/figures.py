"""What the gates look at: a version and the current one, on the same held-out rows, on the same machine."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from fedppd_ray.config.schema import Config
from fedppd_ray.evaluation.run import evaluate_predictor, with_card
from fedppd_ray.federation.types import ClientInfo
from fedppd_ray.inference.predictor import network_predictor
from fedppd_ray.inference.student import Student
from fedppd_ray.models.flat import FlatModel
from fedppd_ray.runs.export import read_student
from fedppd_ray.runs.layout import SITE_FIGURES
from fedppd_ray.runs.remote import Location, open_to_read, read_file
from fedppd_ray.runs.store import RunStore

log = logging.getLogger(__name__)

Figures = dict[str, float | None]
Loaded = tuple[dict[str, Any], FlatModel]

_PASSES = 40
# Two students that differ in one of these cannot be asked about the same rows.
_SAME = ("classes", "input", "normalisation", "table")


def side_by_side(run: Location, version: Location, current: Location | None) -> tuple[Figures, Figures | None]:
    """Figures of a version, and of the current one, on the held-out rows of the run that the version comes from.

    Those of a current that takes other inputs, or knows other classes, are all unknown.
    """
    with open_to_read(run) as opened:
        store = RunStore(opened.folder)
        config = store.config()
        clients = store.clients() if store.has_clients() else []
    # Rows that were made worse are no part of any gate, and take long.
    plain = config.evaluation.model_copy(update={"corruptions": False})
    config = config.model_copy(update={"evaluation": plain})
    mine = read_student(version)
    figures = _figures(config, clients, mine) | {"worst_site_accuracy": _worst_site(run, mine[0]["round"])}
    if current is None:
        return figures | _milliseconds([mine])[0], None
    theirs = read_student(current)
    different = [key for key in _SAME if mine[0].get(key) != theirs[0].get(key)]
    if different:
        log.warning("not comparable with the current version: other %s", ", ".join(different))
        return figures | _milliseconds([mine])[0], {}
    fast, now_fast = _milliseconds([mine, theirs])
    return figures | fast, _figures(config, clients, theirs) | now_fast


def _figures(config: Config, clients: Sequence[ClientInfo], loaded: Loaded) -> Figures:
    """As it is served: at the card's temperature."""
    card, model = loaded
    seen = with_card(evaluate_predictor(config, network_predictor(model), card=card, clients=clients), card).figures
    abstention, sets = seen.get("abstention") or {}, seen.get("sets") or {}
    return {
        **{key: seen["scaled"].get(key) for key in ("accuracy", "nll", "ece", "ood_auroc")},
        "coverage": abstention.get("coverage"),
        "accuracy_answered": abstention.get("accuracy_answered"),
        "set_coverage": sets.get("coverage"),
        "set_size": sets.get("size"),
        "worst_client_accuracy": _worst_client(seen),
        "size_mb": model.export().nbytes / 1e6,
    }


def _worst_client(seen: Mapping[str, Any]) -> float | None:
    found = (seen.get("per_client") or {}).get("accuracy")
    return None if found is None else float(found["worst"])


def _worst_site(run: Location, round_id: int) -> float | None:
    """What the worst-served site found with this round's student on its own rows; None where none has told."""
    try:
        lines = read_file(run, SITE_FIGURES).decode().splitlines()
    except FileNotFoundError:
        return None
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # torn by a crash
            continue
        if entry["round"] == round_id:
            found.append(float(entry["accuracy"]))
    return min(found, default=None)


def _milliseconds(loaded: Sequence[Loaded]) -> list[Figures]:
    """The median time of one row's forward pass; students take turns, so that a busy machine hurts all alike."""
    students = [Student(card, model) for card, model in loaded]
    rows = np.zeros((1, *students[0].shape), np.float32)
    seconds: list[list[float]] = [[] for _ in students]
    for _ in range(_PASSES):
        for student, taken in zip(students, seconds, strict=True):
            started = time.perf_counter()
            student.evidence(rows)
            taken.append(time.perf_counter() - started)
    return [{"latency_ms": 1000 * median(taken)} for taken in seconds]
