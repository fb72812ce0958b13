"""[1] The `data` section: which data set, who holds what, and what networks fit it."""

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from fedppd_ray.config.nouns import DATASETS, FOLDER, NETWORKS, DatasetInfo
from fedppd_ray.config.section import Section
from fedppd_ray.config.table import SHIFTED, TABLE, TableConfig
from fedppd_ray.registry import suggest

# `data.calibration: auto` holds back this share of the rows, a client at least so many, and none of fewer than four
# times that.
AUTO_SHARE, FEWEST_KEPT = 0.1, 10
Calibration = Literal["auto"] | Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)]


class PartitionConfig(Section):
    """Who holds what. `rows_per_client: null` hands out everything."""

    kind: Literal["major_classes", "iid", "dirichlet", "writers", "folders", "column"] = Field(
        default="major_classes",
        description="writers: whole writers per client; folders: as ROOT/clients/<id> says; column: as client_column",
    )
    rows_per_client: int | None = Field(default=None, ge=1, description="rows of a client; null: all are handed out")
    major: int = Field(default=2, ge=1, description="major_classes: classes that a client mostly holds")
    extra_per_class: int = Field(default=10, ge=0, description="major_classes: rows of every class besides")
    alpha: float = Field(default=0.5, gt=0, description="dirichlet: concentration, smaller is more skewed")


class FolderConfig(Section):
    """The facts of a user's own data set (`data.name: folder`), read off its folder where they are not given.

    They are part of the configuration so that a run folder and a client's node need no file to know them.
    """

    classes: tuple[str, ...] = Field(min_length=2, description="names of the classes, in the order of their numbers")
    shape: tuple[int, int, int] = Field(description="channels, height, width")
    mean: tuple[float, ...] = Field(description="of each channel, of values brought to 0–1")
    std: tuple[float, ...] = Field(description="of each channel, likewise")
    range: tuple[float, float] = Field(
        default=(0.0, 255.0),
        description="least and largest value: 0, 255 of 8 bits, 0, 65535 of 16 bits; of floats say it",
    )
    networks: tuple[str, str] | None = Field(default=None, description="teacher and student for network: auto")
    writers: bool = Field(default=False, description="train/writers.npy says who wrote each row")


class DataConfig(Section):
    name: str = Field(default="mnist5k", description="a known data set, or folder or table: your own")
    root: str | None = Field(default=None, description="folder of the data files; default $FEDPPD_DATA")
    folder: FolderConfig | None = Field(default=None, description="name: folder only; default: read off the root")
    table: TableConfig | None = Field(
        default=None, description="name: table only; target, and what is read off the files"
    )
    resize: tuple[int, int] | None = Field(
        default=None, description="name: folder only; height and width that images of other sizes are brought to"
    )
    skip_bad_files: bool = Field(
        default=False, description="name: folder only; leave out and count what cannot be read"
    )
    partition: PartitionConfig = PartitionConfig()
    server_pool: int = Field(default=0, ge=0, description="unlabelled rows on the server, for methods that use them")
    reserved: int = Field(
        default=0, ge=0, description="rows that nobody gets: other methods of the same comparison have them as a pool"
    )
    calibration: Calibration = Field(
        default=0,
        description="held-out rows that set the abstention threshold: a number of common rows, or the share that is "
        "kept back, by each client where each has rows of its own; auto: a tenth",
    )

    @property
    def withheld(self) -> int:
        """Rows that no client gets and that no threshold is set on: the server's, or another method's server's."""
        return max(self.server_pool, self.reserved)

    @property
    def kept_by_clients(self) -> bool:
        """Whether clients, each of which has rows of its own, keep some of them back: there are no common ones."""
        return self.partition.kind == "folders" and not isinstance(self.calibration, int)

    def calibration_rows(self, rows: int) -> int:
        """How many of the common training rows, of which there are so many, set the threshold."""
        if isinstance(self.calibration, int):
            return self.calibration
        return 0 if self.kept_by_clients else self._share_of(rows)

    def kept_rows(self, rows: int) -> int:
        """How many of its own rows, of which it has so many, a client keeps back."""
        return self._share_of(rows) if self.kept_by_clients else 0

    def _share_of(self, rows: int) -> int:
        if self.calibration != "auto":
            return math.ceil(self.calibration * rows - 1e-9)
        return max(FEWEST_KEPT, math.ceil(AUTO_SHARE * rows - 1e-9)) if rows >= 4 * FEWEST_KEPT else 0

    @property
    def info(self) -> DatasetInfo:
        """What is known of the data set; ValueError where that is nothing."""
        if self.name == TABLE:
            if self.table is None:
                raise ValueError("data.table: target is missing: the column to predict")
            table = self.table
            by_client = table.client_column is not None
            return DatasetInfo(TABLE, table.classes, (table.features,), (), (), "none", writers=by_client, table=table)
        if self.name != FOLDER:
            return _known_dataset("data.name", self.name)
        if self.folder is None:
            raise ValueError("data.folder: classes, shape, mean and std of the folder are not known; give them")
        facts = self.folder
        return DatasetInfo(
            FOLDER,
            facts.classes,
            facts.shape,
            facts.mean,
            facts.std,
            "none",
            networks=facts.networks,
            range=facts.range,
            resize=self.resize is not None,
            skip_bad_files=self.skip_bad_files,
            writers=facts.writers,
        )


def check_data(data: DataConfig, ood: Sequence[str]) -> DatasetInfo:
    """The data set's facts, once all that is said of it fits together."""
    info = data.info
    if info.adapts:
        raise ValueError(f"data.name: {info.name} is an out-of-distribution set; it can be evaluation.ood only")
    _check_ood(ood, info)
    if data.name != FOLDER and (data.resize is not None or data.skip_bad_files):
        key = "skip_bad_files" if data.resize is None else "resize"
        raise ValueError(f"data.{key}: only data.name: {FOLDER} takes it, not {data.name}; remove it")
    if data.resize is not None and data.resize != info.shape[1:]:
        raise ValueError(f"data.resize: {data.resize} is not the height and width of data.folder.shape {info.shape}")
    if data.folder is not None:
        _check_folder(data.name, data.folder)
    if data.table is not None and data.name != TABLE:
        raise ValueError(f"data.table: only data.name: {TABLE} takes it, not {data.name}; remove it")
    _check_partition(data.partition, info)
    return info


def is_place(ood: str) -> bool:
    """Whether `evaluation.ood` is a folder or a file of the user's own, and no set by name."""
    return "/" in ood


def _check_ood(ood: Sequence[str], info: DatasetInfo) -> None:
    for name in ood:
        if is_place(name):
            continue
        other = _known_dataset("evaluation.ood", name)
        if info.name in (other.name, other.files):
            raise ValueError(f"evaluation.ood: {name} is the data itself, {info.name}; choose another set")
        if info.table is not None and name != SHIFTED:
            raise ValueError(f"evaluation.ood: {name} are images; for a table set it to {SHIFTED}, or to null")
        if info.table is None and name == SHIFTED:
            raise ValueError(f"evaluation.ood: {SHIFTED} are rows of a table; for images set it to glyphs")
    if len(set(ood)) < len(ood):
        raise ValueError("evaluation.ood: a set comes twice; name each once")


def check_corruptions(info: DatasetInfo) -> None:
    """Test rows are made worse as images of 8 bits are."""
    if info.table is not None or info.range != (0.0, 255.0):
        what = "a table" if info.table is not None else f"values from {info.range[0]:g} to {info.range[1]:g}"
        raise ValueError(f"evaluation.corruptions: they are made of 8-bit images, not of {what}; set it to false")


def _check_folder(name: str, folder: FolderConfig) -> None:
    if name != FOLDER:
        raise ValueError(f"data.folder: only data.name: {FOLDER} takes it, not {name}; remove it")
    if min(folder.shape) < 1 or folder.shape[0] > 4:
        raise ValueError(f"data.folder.shape: {folder.shape} is not 1 to 4 channels, height and width")
    for key in ("mean", "std"):
        if len(getattr(folder, key)) != folder.shape[0]:
            raise ValueError(f"data.folder.{key}: one number per channel, of which there are {folder.shape[0]}")
    if not folder.range[0] < folder.range[1]:
        raise ValueError(f"data.folder.range: {folder.range} must be two numbers, the least and the largest value")
    if min(folder.std) <= 0:
        raise ValueError("data.folder.std: must be above 0")
    if len(set(folder.classes)) < len(folder.classes):
        raise ValueError("data.folder.classes: a name comes twice")


def _check_partition(part: PartitionConfig, info: DatasetInfo) -> None:
    if part.kind == "major_classes" and part.major > len(info.classes):
        raise ValueError(
            f"data.partition.major: {part.major} major classes, but {info.name} has only "
            f"{len(info.classes)} classes; choose at most {len(info.classes)}"
        )
    if part.kind == "writers" and not info.writers:
        raise ValueError(
            f"data.partition.kind: {info.name} does not say who wrote a row; choose major_classes, iid or dirichlet"
        )
    if part.kind == "column" and (info.table is None or info.table.client_column is None):
        raise ValueError(
            "data.partition.kind: column needs data.table.client_column: the column that says whose row it is"
        )


class NetworkChoice(Protocol):
    """What a method's section says of its network: `methods.base.NetworkConfig`."""

    network: str
    network_args: Mapping[str, Any]
    pretrained: bool


def check_network(key: str, choice: NetworkChoice, info: DatasetInfo) -> None:
    """The network of `key` (teacher or student) takes these rows, and has published weights if it needs any."""
    name = choice.network
    chosen = info.network(key) if name == "auto" else name
    if chosen not in NETWORKS:
        raise ValueError(f"{key}.network: unknown network {chosen!r}{suggest(chosen, list(NETWORKS))}")
    spec = NETWORKS[chosen]
    if not spec.takes(info.shape):
        found = f"images {spec.input_shape or ''}, {info.name} has {info.shape}"
        if spec.input_shape is None and spec.channels is not None:
            found = f"{spec.channels} channels, {info.name} has {info.shape[0]}"
        remedy = "use 'auto'" if name != "auto" else _fitting(info)
        raise ValueError(f"{key}.network: {chosen} takes {found}; {remedy}")
    _check_args(key, chosen, choice.network_args, info)
    if choice.pretrained and not spec.pretrained:
        known = ", ".join(name for name in NETWORKS if NETWORKS[name].pretrained)
        raise ValueError(f"{key}.pretrained: {chosen} has no published weights; set {key}.network to one of {known}")


def _check_args(key: str, chosen: str, args: Mapping[str, Any], info: DatasetInfo) -> None:
    """That the constructor has these arguments; what it makes of their values is seen when it is tried."""
    build = NETWORKS[chosen].build
    try:
        signature(build).bind(info.shape, len(info.classes), **args)
    except TypeError as error:
        known = [name for name in list(signature(build).parameters)[2:] if name not in ("args", "kwargs")]
        remedy = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ValueError(f"{key}.network_args: {chosen}: {error}; {remedy}") from None
    except ValueError:
        return  # a builder without a signature, such as one of C code


def _fitting(info: DatasetInfo) -> str:
    fit = [name for name in NETWORKS if NETWORKS[name].takes(info.shape)]
    return f"set it to one of {', '.join(fit)}" if fit else "resize the images to 28×28 (grey) or 32×32 (colour)"


def _known_dataset(key: str, name: str) -> DatasetInfo:
    if name not in DATASETS:
        known = [*DATASETS, FOLDER, TABLE] if key == "data.name" else list(DATASETS)
        raise ValueError(f"{key}: unknown data set {name!r}{suggest(name, known)}")
    return DATASETS[name]
