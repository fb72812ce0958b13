"""What a served student takes: images of one shape and range of values, or rows of a table. Known from its card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedppd_ray.config.table import ColumnConfig
from fedppd_ray.data.parts import BYTES

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ImageInput:
    shape: Shape  # channels, height, width
    range: tuple[float, float] = BYTES

    @property
    def sides(self) -> tuple[int, ...]:
        """Of an image in an array or in JSON: grey ones are H×W, all others H×W×C."""
        channels, height, width = self.shape
        return (height, width) if channels == 1 else (height, width, channels)

    @property
    def bounds(self) -> str:
        return f"{self.range[0]:g}–{self.range[1]:g}"


@dataclass(frozen=True)
class TableInput:
    columns: tuple[ColumnConfig, ...]

    @property
    def numeric(self) -> bool:
        return all(column.kind == "numeric" for column in self.columns)


Takes = ImageInput | TableInput


def described(card: Mapping[str, Any]) -> str:
    """What decoder processes are told of a card."""
    if "table" in card:
        return json.dumps({"columns": card["table"]["columns"]})
    size, known = card["input"], card["normalisation"]
    shape = (size["channels"], size["height"], size["width"])
    return json.dumps({"shape": shape, "range": known.get("range") or BYTES})


@lru_cache(maxsize=8)
def taken(text: str) -> Takes:
    """The way back; what was said once is not parsed again for each request."""
    content = json.loads(text)
    if "columns" in content:
        return TableInput(tuple(ColumnConfig.model_validate(column) for column in content["columns"]))
    (channels, height, width), (low, high) = content["shape"], content["range"]
    return ImageInput((channels, height, width), (float(low), float(high)))
