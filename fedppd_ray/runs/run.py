"""A run as a whole, for those who read it: its configuration, metrics, figures and student."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedppd_ray.config.data import check_corruptions
from fedppd_ray.config.schema import Config
from fedppd_ray.data.holdings import read_own
from fedppd_ray.data.pictures import PICTURES, TABLES, found_files, picture_rows
from fedppd_ray.data.readers import tables
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.run import Evaluation, evaluate_predictor, evaluate_rows, with_card
from fedppd_ray.inference.abstention import never_abstains
from fedppd_ray.inference.predictor import BATCH, network_predictor
from fedppd_ray.inference.student import Student
from fedppd_ray.runs.export import load_student, read_card, read_student
from fedppd_ray.runs.remote import Location, open_to_read
from fedppd_ray.runs.store import RunStore

log = logging.getLogger("fedppd")


class Run:
    """A training run on disk or in object storage; nothing is read until it is asked for.

    Parameters: `location`, the folder or s3:// URL that `train` wrote.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def __repr__(self) -> str:
        return f"Run({str(self.location)!r})"

    def config(self) -> Config:
        """The configuration, with every default filled in."""
        with open_to_read(self.location) as run:
            return RunStore(run.folder).config()

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per round (pandas.DataFrame takes the list): accuracy, nll, ece, seconds, clients, …"""
        with open_to_read(self.location) as run:
            return RunStore(run.folder).history()

    def card(self) -> dict[str, Any]:
        """The model card of the exported student."""
        return read_card(self.location)

    def student(self) -> Student:
        """The exported student, ready to predict."""
        return load_student(self.location)

    def evaluate(self, *, corruptions: bool = False, data: Sequence[Path | str] = ()) -> dict[str, Any]:
        """The figures of the exported student on held-out rows: accuracy, calibration, OOD detection, abstention.

        Parameters: `corruptions`, on test rows made worse too, whatever the configuration says; `data`, labelled
        folders or tables to evaluate on instead, each a site by its name.
        """
        if data:
            return evaluate_data(self.location, [Path(place) for place in data]).figures
        return evaluate_run(self.location, corruptions=corruptions).figures

    def predict(
        self, images: Sequence[Path | str], coverage: float | None = None, confidence: float | None = None
    ) -> list[dict[str, Any]]:
        """Answers for image files, or for the rows of CSV files, in their order.

        Parameters: `images`, paths of image files or of tables, or of folders with such; `coverage`, another share of
        answers than the default; `confidence`, with which each answer's `set` of classes holds the right one.
        """
        student = self.student()
        _warn(student.card)
        images = found_files(images, TABLES if student.table is not None else PICTURES)
        if student.table is not None:
            return [
                {"file": str(path), "row": row, **answer}
                for path in images
                for row, answer in enumerate(
                    student.predict_table(tables.read(Path(path)), coverage, str(path), confidence=confidence), 1
                )
            ]
        answers = []
        for start in range(0, len(images), BATCH):  # a folder may hold more than memory does
            rows = picture_rows(images[start : start + BATCH], student.shape, student.range)
            answers += student.predict(rows, coverage, confidence)
        return [{"image": str(path), **answer} for path, answer in zip(images, answers, strict=True)]


def evaluate_run(location: Location, *, corruptions: bool = False) -> Evaluation:
    """The figures of the exported student, with the predictions they come from."""
    with open_to_read(location) as run:
        store = RunStore(run.folder)
        config, history = store.config(), store.history()
        clients = store.clients() if store.has_clients() else []
        round_id = read_card(location)["round"]
        own = {"per_site": found} if (found := store.client_figures(round_id)) else {}
    if corruptions:
        try:
            check_corruptions(config.dataset)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"corruptions": True})})
    card, model = read_student(location)
    _warn(card)
    seen = with_card(evaluate_predictor(config, network_predictor(model), card=card, clients=clients), card)
    return replace(seen, figures={**seen.figures, **own, **teacher_of(history, card["round"])})


def evaluate_data(location: Location, places: Sequence[Path]) -> Evaluation:
    """The exported student on labelled rows that a user brings; the run's own data are not needed."""
    with open_to_read(location) as run:
        config = RunStore(run.folder).config()
    names = [place.expanduser().absolute().name for place in places]
    if len(set(names)) < len(names):
        raise ConfigError("--data: two of the folders have the same name, by which figures are told apart; rename one")
    card, model = read_student(location)
    _warn(card)
    parts = {name: read_own(place, config.dataset) for name, place in zip(names, places, strict=True)}
    return with_card(evaluate_rows(parts, config.dataset, network_predictor(model), card, config.seed), card)


def _warn(card: Mapping[str, Any]) -> None:
    if warning := never_abstains(card):
        log.warning(warning)


def teacher_of(history: Sequence[Mapping[str, Any]], round_id: int) -> dict[str, float]:
    """The teacher's accuracy in that round, where the method has one."""
    found = [line["teacher_accuracy"] for line in history if line["round"] == round_id and "teacher_accuracy" in line]
    return {"teacher_accuracy": found[-1]} if found else {}
