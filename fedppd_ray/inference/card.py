"""The model card of an exported student (`model.json`): what it must say for the student to be used.

Validated once, where it is read, so that nobody downstream meets a missing or odd entry. Unknown entries are kept: a
newer version of the package may write more.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedppd_ray.config.table import TableConfig
from fedppd_ray.errors import CheckpointError

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Between = Annotated[float, Field(gt=0, lt=1)]


class _Part(BaseModel):
    # Strict: "3" is no round and True no size.
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


class InputSize(_Part):
    channels: int = Field(ge=1, le=64)
    height: int = Field(ge=1, le=65536)
    width: int = Field(ge=1, le=65536)


class Normalisation(_Part):
    mean: list[Finite] = Field(min_length=1)
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)

    range: Annotated[list[Finite], Field(min_length=2, max_length=2)] | None = None  # of the values; None: 0 to 255

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("range must be the least and the largest value")
        return self


class RowSize(_Part):
    numbers: int = Field(ge=1, le=2**20)


class RiskRow(_Part):
    coverage: Share
    threshold: Finite
    risk: float = Field(ge=0, le=100)


class Abstention(_Part):
    rows: int = Field(ge=1)
    coverage: Share
    threshold: Finite
    table: list[RiskRow] = Field(min_length=1)

    @model_validator(mode="after")
    def _answers_every_coverage(self) -> Self:
        if max(row.coverage for row in self.table) != 1:
            raise ValueError("the table lacks the row of coverage 1, so that some requests would find no level")
        return self


class OodFlag(_Part):
    score: Name
    false_alarms: Between
    threshold: Finite | None  # null: nothing is flagged
    rows: int = Field(ge=1)


Counts = list[Annotated[int, Field(ge=0)]]


class DriftRecord(_Part):
    """Counts of calibration rows, that served ones are compared with: see `inference/drift.py`."""

    rows: int = Field(ge=1)
    directions: list[list[Finite]] = Field(min_length=1)
    entropy: Counts = Field(min_length=2)
    classes: Counts
    projections: list[Counts] = Field(min_length=1)


class SetLevel(_Part):
    confidence: Between
    thresholds: list[Finite | None] = Field(min_length=1)  # one, or one for each class; null: the class is in every set


class Conformal(_Part):
    """Prediction sets: see `inference/conformal.py`. What it promises is promised of all rows together."""

    method: Literal["lac", "aps", "raps"]
    penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    free_classes: int = Field(0, ge=0)
    guarantee: Literal["marginal"]
    rows: int = Field(ge=1)
    confidence: Between
    table: list[SetLevel]


class Card(_Part):
    """What every card has; an image's and a table's say how their rows become the network's inputs."""

    format: Literal[1]
    name: Name
    version: Name
    round: int = Field(ge=0)
    method: Name
    network: Name
    network_args: dict[str, Any] = {}
    network_source: Digest | None = None  # of a user's own network: the sha256 of its file
    classes: list[Name] = Field(min_length=2)
    metrics: dict[str, float | None]
    abstention: Abstention | None
    conformal: Conformal | None = None
    ood: OodFlag | None = None
    drift: DriftRecord | None = None
    config_hash: Digest
    sha256: Digest

    @model_validator(mode="after")
    def _drift_fits(self) -> Self:
        if self.drift is not None:
            sizes = {len(self.classes), len(self.drift.classes), *map(len, self.drift.directions)}
            if len(sizes) > 1 or len(self.drift.directions) != len(self.drift.projections):
                raise ValueError("drift: its counts do not fit the classes")
            if any(sum(counts) != self.drift.rows for counts in (self.drift.entropy, *self.drift.projections)):
                raise ValueError("drift: its counts do not add up to its rows")
        return self

    @model_validator(mode="after")
    def _sets_fit(self) -> Self:
        for level in self.conformal.table if self.conformal else ():
            if len(level.thresholds) not in (1, len(self.classes)):
                raise ValueError(f"conformal: confidence {level.confidence:g} needs a threshold, or one for each class")
        return self


class ImageCard(Card):
    input: InputSize
    normalisation: Normalisation

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if not len(self.normalisation.mean) == len(self.normalisation.std) == self.input.channels:
            raise ValueError("normalisation needs a mean and a std for each channel of input")
        return self


class TableCard(Card):
    input: RowSize
    table: TableConfig

    @field_validator("table", mode="before")
    @classmethod
    def _read(cls, value: object) -> TableConfig:
        """By the section's own rules: JSON has lists where it has tuples, which a strict model refuses."""
        return TableConfig.model_validate(value)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.table.features != self.input.numbers:
            raise ValueError(f"the columns of table make {self.table.features} numbers, not input.numbers")
        if list(self.table.classes) != self.classes:
            raise ValueError("table.classes are not the classes")
        return self


def checked_card(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same entries, every one of them sound; raises `CheckpointError` that names the first that is not."""
    try:
        (TableCard if "table" in content else ImageCard).model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        raise CheckpointError(f"{path}: is not a sound model card ({reason}); export the student again") from None
    return dict(content)
