"""[1] The `data` section: which data set, who holds what, and what networks fit it."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fedppd_ray.config_section import Section
from fedppd_ray.data.catalog import CATALOG, FOLDER, DatasetInfo
from fedppd_ray.models.networks import NETWORKS


class PartitionConfig(Section):
    """Who holds what. `rows_per_client: null` hands out everything."""

    kind: Literal["major_classes", "iid", "dirichlet", "writers", "folders"] = Field(
        default="major_classes", description="writers: whole writers a client; folders: as ROOT/clients/<id> says"
    )
    rows_per_client: int | None = Field(default=None, ge=1)
    major: int = Field(default=2, ge=1, description="major_classes: classes a client mostly holds")
    extra_per_class: int = Field(default=10, ge=0, description="major_classes: rows of every class besides")
    alpha: float = Field(default=0.5, gt=0, description="dirichlet: concentration, smaller is more skewed")


class FolderConfig(Section):
    """The facts of a user's own data set (`data.name: folder`), read off its folder where they are not given.

    They are part of the configuration so that a run folder and a client's node need no file to know them.
    """

    classes: tuple[str, ...] = Field(min_length=2)
    shape: tuple[int, int, int] = Field(description="channels, height, width")
    mean: tuple[float, ...]
    std: tuple[float, ...]
    networks: tuple[str, str] | None = Field(default=None, description="teacher and student for network: auto")
    writers: bool = Field(default=False, description="train/writers.npy says who wrote each row")


class DataConfig(Section):
    name: str = "mnist5k"
    root: str | None = Field(default=None, description="folder of the data files; default $FEDPPD_DATA")
    folder: FolderConfig | None = Field(default=None, description="name: folder only; default: read off the root")
    partition: PartitionConfig = PartitionConfig()
    server_pool: int = Field(default=0, ge=0, description="unlabelled rows on the server")
    calibration: int = Field(default=0, ge=0, description="held-out rows that set the abstention threshold")

    @property
    def info(self) -> DatasetInfo:
        """What is known of the data set; ValueError where that is nothing."""
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
            writers=facts.writers,
        )


def check_data(data: DataConfig, ood: str | None) -> DatasetInfo:
    """The data set's facts, once all that is said of it fits together."""
    info = data.info
    if info.adapts:
        raise ValueError(f"data.name: {info.name} is an out-of-distribution set; it can be evaluation.ood only")
    if ood is not None:
        other = _known_dataset("evaluation.ood", ood)
        if not other.adapts and other.shape != info.shape:
            raise ValueError(f"evaluation.ood: {other.name} has images {other.shape}, {info.name} {info.shape}")
    if data.folder is not None:
        _check_folder(data.name, data.folder)
    _check_partition(data.partition, info)
    return info


def _check_folder(name: str, folder: FolderConfig) -> None:
    if name != FOLDER:
        raise ValueError(f"data.folder: only data.name: {FOLDER} takes it, not {name}; remove it")
    if min(folder.shape) < 1 or folder.shape[0] not in (1, 3):
        raise ValueError(f"data.folder.shape: {folder.shape} is not 1 or 3 channels, height and width")
    for key in ("mean", "std"):
        if len(getattr(folder, key)) != folder.shape[0]:
            raise ValueError(f"data.folder.{key}: one number a channel, of which there are {folder.shape[0]}")
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
    if part.kind == "folders" and info.name != FOLDER:
        raise ValueError(f"data.partition.kind: folders is for data.name: {FOLDER}, not {info.name}")


def check_network(key: str, name: str, pretrained: bool, info: DatasetInfo) -> None:
    """The network of `key` (teacher or student) takes these images, and has published weights if it needs any."""
    chosen = info.network(key) if name == "auto" else name
    if chosen not in NETWORKS:
        if name == "auto" and info.networks is None:
            raise ValueError(f"{key}.network: no network is known for images {info.shape}; {_fitting(info)}")
        raise ValueError(f"{key}.network: unknown network {chosen!r}{suggest(chosen, NETWORKS)}")
    takes, channels = NETWORKS[chosen].input_shape, NETWORKS[chosen].channels
    remedy = "use 'auto'" if name != "auto" else _fitting(info)
    if takes is not None and takes != info.shape:
        raise ValueError(f"{key}.network: {chosen} takes images {takes}, {info.name} has {info.shape}; {remedy}")
    if channels is not None and channels != info.shape[0]:
        raise ValueError(
            f"{key}.network: {chosen} takes {channels} channels, {info.name} has {info.shape[0]}; {remedy}"
        )
    if pretrained and not NETWORKS[chosen].pretrained:
        known = ", ".join(name for name, spec in NETWORKS.items() if spec.pretrained)
        raise ValueError(f"{key}.pretrained: {chosen} has no published weights; set {key}.network to one of {known}")


def _fitting(info: DatasetInfo) -> str:
    fit = [
        name
        for name, spec in NETWORKS.items()
        if spec.input_shape == info.shape or (spec.input_shape is None and spec.channels == info.shape[0])
    ]
    return f"set it to one of {', '.join(fit)}" if fit else "resize the images to 28×28 (grey) or 32×32 (colour)"


def _known_dataset(key: str, name: str) -> DatasetInfo:
    if name not in CATALOG:
        known = [*CATALOG, FOLDER] if key == "data.name" else list(CATALOG)
        raise ValueError(f"{key}: unknown data set {name!r}{suggest(name, known)}")
    return CATALOG[name]


def suggest(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(known))}"
