"""One part of a data set, as every reader returns it and every consumer sees it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]  # rows × channels × height × width
Labels = NDArray[np.int64]
PartName = Literal["train", "test"]


@dataclass(frozen=True)
class Split:
    """Rows of a data set. `writers` numbers who wrote each row, where the data set knows."""

    images: Images
    labels: Labels
    writers: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)
