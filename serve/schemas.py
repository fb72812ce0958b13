"""Requests and answers as OpenAPI shows them, and the exact validator of a model's JSON input."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from serve.takes import ImageInput


class ModelReference(BaseModel):
    name: str
    version: str = Field(description="Changes with every export: round and digest of the weights.")
    round: int


class Prediction(BaseModel):
    label: int
    class_name: str
    probabilities: list[float] = Field(description="One for each class; they sum to 1.")
    entropy: float = Field(description="Of the probabilities, in nats.")
    normalized_entropy: float = Field(ge=0, le=1, description="Entropy divided by its maximum, log(classes).")
    abstain: bool = Field(description="The entropy is above the threshold: better ask a person.")
    ood: bool = Field(description="By the card's OOD score, hardly any known row looks like this one.")
    outside: list[str] | None = Field(
        None, description="Of a table's row: columns whose value is beyond what training saw. Absent for images."
    )
    set: list[str] | None = Field(
        None, description="Where a confidence was asked for: classes, one of which is right so surely; else absent."
    )


class AbstentionLevel(BaseModel):
    coverage: float
    threshold: float


class SetLevel(BaseModel):
    """How the sets were made. Promised of all rows like the calibration rows, not of a class or a site by itself."""

    method: str
    confidence: float = Field(description="At least the one that was asked for.")
    guarantee: str
    rows: int = Field(description="Calibration rows behind it.")


class PredictResponse(BaseModel):
    model: ModelReference
    abstention: AbstentionLevel | None = Field(description="The current level; null for an uncalibrated student.")
    conformal: SetLevel | None = Field(None, description="Where a confidence was asked for; else absent.")
    hint: str | None = Field(None, description="What looks wrong with the input, where something does; else absent.")
    predictions: list[Prediction]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    coverage: float | None = Field(
        None, gt=0, le=1, description="Abstain so that at least this share of calibration rows is answered."
    )
    confidence: float | None = Field(None, gt=0, lt=1, description="Name a set of classes that is right so surely.")


class PredictRequest(_Request):
    """`instances` are images as rows of raw pixel values in the range of the model card (0–255 where it names none):
    H×W (grey) or H×W×C."""

    instances: list[list[list[float]]] | list[list[list[list[float]]]] = Field(min_length=1)


class PredictRowsRequest(_Request):
    """`instances` are rows of a table: objects by column name, or lists in the order of the card's columns. Categories
    by name; null where a value is missing."""

    instances: list[dict[str, float | str | None]] | list[list[float | str | None]] = Field(min_length=1)


class Problem(BaseModel):
    code: str
    field: str = Field(description="The part of the request that is to be mended, e.g. instances[0][3].")
    message: str


class ErrorResponse(BaseModel):
    error: Problem


class ReloadState(BaseModel):
    watching: bool
    loaded_at: str
    reloads: int
    refused: int = Field(description="Exports that were refused since the service started.")
    error: str | None = Field(description="Why the newest export is not served; null when it is.")


class ModelResponse(BaseModel):
    """The model card of the export, and how the service stands to it."""

    model_config = ConfigDict(extra="allow")

    name: str
    version: str
    round: int
    classes: list[str]
    input: dict[str, int]
    metrics: dict[str, Any]
    abstention: dict[str, Any] | None
    config_hash: str
    reload: ReloadState


class DriftResponse(BaseModel):
    """How windows of answers compare with what the export recorded on its calibration rows."""

    status: str = Field(description="quiet, drift, waiting (no window yet) or unknown (an export without a record).")
    model: ModelReference
    calibration_rows: int
    false_alarms_a_day: float
    level: float = Field(description="Of one window's three tests together.")
    window_seconds: float
    window_rows: int = Field(description="Counted so far in the window that is open.")
    last: dict[str, Any] | None = Field(description="The last window: rows, statistics, p-values.")


class Health(BaseModel):
    status: str


Validator = type[BaseModel]


def input_validator(takes: ImageInput, max_images: int) -> Validator:
    """`PredictRequest` for exactly this input: shape, range and finiteness are checked by compiled code.

    `fail_fast` stops at the first wrong pixel. Without it, a body full of wrong ones costs an error object each.
    """
    (channels, height, width), (low, high) = takes.shape, takes.range
    pixel = Annotated[float, Field(ge=low, le=high, allow_inf_nan=False, strict=True)]

    def exactly(item: Any, length: int) -> Any:
        return Annotated[list[item], Field(min_length=length, max_length=length, fail_fast=True)]

    point = pixel if channels == 1 else exactly(pixel, channels)
    image = exactly(exactly(point, width), height)
    instances = Annotated[list[image], Field(min_length=1, max_length=max_images, fail_fast=True)]  # type: ignore[valid-type]
    share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
    between = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False, strict=True)]
    return create_model(
        "PredictInput",
        __config__=ConfigDict(extra="forbid"),
        instances=(instances, ...),
        coverage=(share | None, None),
        confidence=(between | None, None),
    )
