"""What a configuration may name, and what is known of it before anything is built or opened.

The rooms below register what they have: `methods/` the methods, `models/` the networks, `data/` the data sets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedppd_ray.registry import Registry

# Of a row as networks take it: (channels, height, width) of an image, (numbers,) of a table's row.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a data set."""

    name: str
    classes: tuple[str, ...]
    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    family: str  # which of the paper's networks fit: "<family>_teacher", "<family>_student"; "none" for none
    # Renders itself in the shape of the data set it is held against (out-of-distribution sets only).
    adapts: bool = False
    # The set whose test rows it is made of (out-of-distribution sets only).
    files: str | None = None
    # Teacher and student by name, where they are no family of their own.
    networks: tuple[str, str] | None = None
    # Every row says who wrote it: such a set can be partitioned by writers.
    writers: bool = False
    # Of images: what their values range over (8 bits, 16 bits, or as the user states), whether they are resized, and
    # whether files that cannot be used are left out.
    range: tuple[float, float] = (0.0, 255.0)
    resize: bool = False
    skip_bad_files: bool = False
    # `config.table.TableConfig`: how a row of a table becomes numbers. None: rows are images.
    table: Any = None

    def network(self, role: str) -> str:
        """The paper's network for this data; where it has none, a small one that takes any shape."""
        if self.networks is not None:
            return self.networks[0 if role == "teacher" else 1]
        if self.family == "none":
            return f"{'small' if len(self.shape) == 3 else 'mlp'}_{role}"
        return f"{self.family}_{role}"


@dataclass(frozen=True)
class NetworkSpec:
    """How to build a network; `input_shape` is what it takes, or None for any with that many `channels` (None: any)."""

    input_shape: Shape | None
    build: Callable[..., Any]  # (shape, classes, **network_args) → nn.Module, its weights undefined
    channels: int | None = None
    pretrained: str | None = None  # torchvision's name of its published weights
    images: bool = True  # takes images only; else rows of any shape

    def takes(self, shape: Shape) -> bool:
        if self.images and len(shape) != 3:
            return False
        return self.input_shape in (None, shape) and self.channels in (None, shape[0])


@dataclass(frozen=True)
class OwnData:
    """A kind of data that users bring: where its facts, and its clients, are read off the data root."""

    place: Callable[[str | None], Path]  # the folder that `data.root`, or its absence, means
    # The facts, as the section `data.<kind>` holds them, from the place and from what the user gave of `data`.
    describe: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]
    clients: Callable[[Path], list[str]]  # who has rows of their own there, sorted; none: nobody
    # The same facts where every client has a place of its own: client → place, the data root, and the section.
    from_clients: Callable[[Mapping[str, str], Path, Mapping[str, Any]], Mapping[str, Any]]
    # Whether what the user gave of the section leaves facts to be read.
    incomplete: Callable[[Mapping[str, Any]], bool] = lambda _given: False


# Classes that implement `methods.base.Method`.
METHODS: Registry[Any] = Registry("method", built_in="fedppd_ray.methods")
NETWORKS: Registry[NetworkSpec] = Registry("network", built_in="fedppd_ray.models.networks")
DATASETS: Registry[DatasetInfo] = Registry("data set", built_in="fedppd_ray.data.catalog")
OWN_DATA: Registry[OwnData] = Registry("kind of own data", built_in="fedppd_ray.data.own")
# inference.scores.Score: how unsure a prediction is.
SCORES: Registry[Any] = Registry("score", built_in="fedppd_ray.inference.scores")
# federation.aggregate.Rule: how clients' models become one; federation.transforms: what an update passes at the client.
AGGREGATIONS: Registry[Any] = Registry("aggregation", built_in="fedppd_ray.federation.aggregate")
TRANSFORMS: Registry[Any] = Registry("transform", built_in="fedppd_ray.federation.transforms")
# inference.questions.Question: what clients may be asked about rows that they keep back.
QUESTIONS: Registry[Any] = Registry("question", built_in="fedppd_ray.evaluation.questions")
FOLDER = "folder"  # the data set that users bring: its facts are in `data.folder` of the configuration
