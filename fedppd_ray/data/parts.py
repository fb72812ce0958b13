"""One part of a data set, as every reader returns it and every consumer sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]  # rows × channels × height × width
Values = NDArray[Any]  # images, or float32 rows × numbers of a table
Labels = NDArray[np.int64]
PartName = Literal["train", "test"]
# Rows × channels × height × width as they come in: values of 0–255 as in the training images.
RawRows = NDArray[np.uint8] | NDArray[np.float32]
BYTES = (0.0, 255.0)  # the range of 8 bits


@dataclass(frozen=True)
class Split:
    """Rows of a data set. `images` are the rows of a table too; `writers` numbers whose each row is, where known."""

    images: Values
    labels: Labels
    writers: NDArray[np.int64] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)  # files that could not be used → why

    def __len__(self) -> int:
        return len(self.labels)
