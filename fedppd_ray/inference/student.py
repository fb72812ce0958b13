"""An exported student: from rows as they come in to answers. What `evaluate` computes, row by row."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedppd_ray.config.nouns import Shape
from fedppd_ray.config.table import TableConfig
from fedppd_ray.data.encoding import Columns, encode, outside
from fedppd_ray.data.parts import BYTES, RawRows
from fedppd_ray.data.rows import network_inputs, normalisation
from fedppd_ray.errors import ConfigError
from fedppd_ray.inference.abstention import abstention_level, score_of, temperature_of
from fedppd_ray.inference.conformal import conformal_level
from fedppd_ray.inference.ood_flag import is_foreign, ood_score_of, scores_beyond
from fedppd_ray.inference.predictor import BATCH, network_predictor
from fedppd_ray.inference.scores import Floats, entropy, score_named
from fedppd_ray.inference.temperature import scaled
from fedppd_ray.models.flat import FlatModel


class Student:
    """One network with its model card: predicts, says how sure it is, and when it would rather not answer.

    Parameters: `card`, the model card; `model`, the loaded network. `fedppd_ray.Run(...).student()` makes one.
    """

    def __init__(self, card: dict[str, Any], model: FlatModel) -> None:
        self.card = card
        self.shape = input_shape(card)
        self.table = TableConfig.model_validate(card["table"]) if "table" in card else None
        self.temperature = temperature_of(card)
        self._beyond = scores_beyond(card)
        self._predict = network_predictor(model)
        self.range = BYTES
        if self.table is None:
            known = card["normalisation"]
            low, high = known.get("range", BYTES)
            self.range = (float(low), float(high))
            self._scale, self._shift = normalisation(known["mean"], known["std"], self.range)

    def log_probabilities(self, rows: RawRows) -> Floats:
        """One forward pass, `BATCH` rows at a time, in float64, at the card's temperature."""
        return self.evidence(rows)[:, : len(self.card["classes"])]

    def evidence(self, rows: RawRows) -> Floats:
        """What `describe_predictions` takes, from one forward pass: the log-probabilities of every row.

        Where a score of the card is no function of them, it has a column more. Rows can be cut and joined. Those of a
        table come as `encode` makes them.
        """
        return np.concatenate([self._pass(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)])

    def _pass(self, rows: RawRows) -> Floats:
        inputs = self._inputs(rows)
        if not self._beyond:
            return scaled(self._predict(inputs).numpy(), self.temperature)
        outputs = self._predict.outputs(inputs)
        more = [score.of(outputs) for score in self._beyond]
        return np.column_stack([scaled(outputs.log_probabilities, self.temperature), *more])

    def _inputs(self, rows: RawRows) -> Tensor:
        if self.table is not None:
            return torch.from_numpy(np.array(rows, np.float32))
        return network_inputs(rows, self._scale, self._shift)

    def predict_table(
        self,
        columns: Columns,
        coverage: float | None = None,
        where: str = "rows",
        *,
        confidence: float | None = None,
    ) -> list[dict[str, Any]]:
        """As `predict`, of a table's columns of text (None: missing); `outside` names what training has not seen."""
        if self.table is None:
            raise ConfigError("this student takes images, not rows of a table")
        facts = self.table.columns
        answers = self.predict(encode(columns, facts, where), coverage, confidence)
        odd = outside(columns, facts)
        return [{**answer, "outside": names} for answer, names in zip(answers, odd, strict=True)]

    def predict(
        self, rows: RawRows, coverage: float | None = None, confidence: float | None = None
    ) -> list[dict[str, Any]]:
        """Per row: label, class_name, probabilities, entropy, normalized_entropy, abstain, ood; with `confidence`, set.

        Parameters: `rows`, N × channels × height × width values of 0–255; `coverage`, another share of answered rows
        than the export's default; `confidence`, that the set holds the right class.
        """
        return describe_predictions(self.card, self.evidence(rows), coverage, confidence)


def input_shape(card: dict[str, Any]) -> Shape:
    """What the network of a model card takes: (channels, height, width), or (numbers,)."""
    size = card["input"]
    return (size["numbers"],) if "numbers" in size else (size["channels"], size["height"], size["width"])


def describe_predictions(
    card: dict[str, Any], evidence: Floats, coverage: float | None = None, confidence: float | None = None
) -> list[dict[str, Any]]:
    """label, class_name, probabilities, entropy, normalized_entropy, abstain, ood of each row of `Student.evidence`.

    `coverage` asks for another share of answered rows than the export's default, `confidence` for sets of classes.
    """
    level = abstention_level(card, coverage)
    threshold = level["threshold"] if level else math.inf
    classes = card["classes"]
    log_probabilities, extra = np.split(evidence, [len(classes)], axis=1)
    uncertainty = entropy(log_probabilities)
    known = {"entropy": uncertainty, **{score.name: extra[:, at] for at, score in enumerate(scores_beyond(card))}}

    def by(name: str) -> Floats:
        if name not in known:
            known[name] = score_named(name)(log_probabilities)
        return known[name]

    # Whole arrays first, then one pass over plain Python numbers: a large batch spends its time in the network.
    columns = (
        log_probabilities.argmax(axis=1).tolist(),
        np.exp(log_probabilities).tolist(),
        uncertainty.tolist(),
        np.clip(uncertainty / math.log(len(classes)), 0.0, 1.0).tolist(),
        (by(score_of(card)) > threshold).tolist(),
        is_foreign(card, by(ood_score_of(card))).tolist(),
    )
    answers = [
        {
            "label": label,
            "class_name": classes[label],
            "probabilities": probabilities,
            "entropy": nats,
            "normalized_entropy": share,
            "abstain": abstain,
            "ood": foreign,
        }
        for label, probabilities, nats, share, abstain, foreign in zip(*columns, strict=True)
    ]
    sets = conformal_level(card, confidence)
    if sets is not None:
        for answer, inside in zip(answers, sets.members(log_probabilities), strict=True):
            answer["set"] = [classes[label] for label in np.flatnonzero(inside).tolist()]
    return answers
