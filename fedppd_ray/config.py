"""[1] Configuration: frozen models, unknown keys rejected, every error names its key and the remedy.

`config_file.load_config` makes a `Config` of a YAML file and `--set key=value` overrides. Pass the narrow section
on, not the whole.
"""

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedppd_ray.data.catalog import CATALOG, DatasetInfo
from fedppd_ray.errors import ConfigError
from fedppd_ray.models.networks import NETWORKS


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Python and pydantic take true for 1; who writes `seed: yes` means something else."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"{str(value).lower()} is not a valid value")
        return value


_ROW_SCALED = re.compile(r"^((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)([*/])N$", re.IGNORECASE)


def _check_row_scaled(value: object) -> object:
    if isinstance(value, str):
        text = value.replace(" ", "")
        if _ROW_SCALED.match(text):
            return text
        # YAML 1.1 reads 1e-4 as text.
        number = number_or_text(text)
        if not isinstance(number, float):
            raise ValueError(f"{value!r} is neither a number nor of the form '4/N' or '1e-4*N'")
        return number
    return value


# A number, or one that scales with the client's number of rows N: "4/N", "1e-4*N".
RowScaled = Annotated[Annotated[float, Field(ge=0)] | str, BeforeValidator(_check_row_scaled)]


def for_rows(value: float | str, rows: int) -> float:
    """The value of a `RowScaled` setting for a client with that many rows."""
    if isinstance(value, str):
        match = _ROW_SCALED.match(value)
        if match is None:
            raise ConfigError(f"{value!r} is neither a number nor of the form '4/N' or '1e-4*N'")
        number = float(match[1])
        return number / rows if match[2] == "/" else number * rows
    return value


class PartitionConfig(Section):
    """Who holds what. `rows_per_client: null` hands out everything."""

    kind: Literal["major_classes", "iid", "dirichlet"] = "major_classes"
    rows_per_client: int | None = Field(default=None, ge=1)
    major: int = Field(default=2, ge=1, description="major_classes: classes a client mostly holds")
    extra_per_class: int = Field(default=10, ge=0, description="major_classes: rows of every class besides")
    alpha: float = Field(default=0.5, gt=0, description="dirichlet: concentration, smaller is more skewed")


class DataConfig(Section):
    name: str = "mnist5k"
    root: str | None = Field(default=None, description="folder of the data files; default $FEDPPD_DATA")
    partition: PartitionConfig = PartitionConfig()
    server_pool: int = Field(default=0, ge=0, description="unlabelled rows on the server")
    calibration: int = Field(default=0, ge=0, description="held-out rows that set the abstention threshold")


class FederationConfig(Section):
    clients: int = Field(default=10, ge=1)
    rounds: int = Field(default=20, ge=1)
    participation: float = Field(default=1.0, gt=0, le=1, description="share of the clients in a round")
    quorum: float = Field(default=0.5, gt=0, le=1, description="share of a round's clients that must deliver")
    retries: int = Field(default=1, ge=0, description="second chances of a client within a round")
    deadline_s: float | None = Field(default=None, gt=0, description="seconds a round waits for its clients")


class ClientConfig(Section):
    epochs: int = Field(default=5, ge=1)
    batch_size: int = Field(default=40, ge=1)
    augment: Literal["none", "crop_flip"] = "none"
    rate_decay: float = Field(default=1.0, gt=0, le=1, description="factor on both rates from round to round")


class TeacherConfig(Section):
    """The SGLD chain. T = 1 is the Bayes posterior; the authors ran T = 4/N."""

    network: str = "auto"
    rate: float = Field(default=0.045, gt=0, description="SGLD step size η")
    rate_step: int = Field(default=2, ge=1, description="StepLR: local epochs between two decays")
    rate_gamma: float = Field(default=0.85, gt=0, le=1)
    temperature: RowScaled = "4/N"
    prior_precision: RowScaled = "1e-4*N"
    send: Literal["map", "last"] = "map"


class StudentConfig(Section):
    network: str = "auto"
    rate: float = Field(default=0.055, gt=0)
    weight_decay: float = Field(default=1e-4, ge=0)
    input_noise: float = Field(default=0.001, ge=0, description="std on normalised pixels")
    distill_every: Literal["epoch", "iteration"] = "epoch"


class DistillConfig(Section):
    """Server_Update "Distill": Gaussian, ensemble, SWA."""

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=64, ge=1)
    teacher_rate: float = Field(default=0.001, gt=0)
    student_rate: float = Field(default=0.001, gt=0)
    samples: int = Field(default=10, ge=0, description="M, models drawn from the Gaussian")
    spread: float = Field(default=0.1, ge=0, description="factor on the Gaussian's standard deviation")
    scale: float = Field(default=1.0, gt=0, description="factor on the mean length of the clients' deltas")
    min_variance: float = Field(default=1e-5, ge=0)
    sharpen: float = Field(default=1.0, gt=0, description="pseudo-labels p^(1/sharpen), renormalised")
    divide_by_classes: bool = Field(default=False, description="the authors' loss: KL / number of classes")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0)
    swa_start: int = Field(default=500, ge=0, description="step; never later than half of the steps")
    swa_every: int = Field(default=25, ge=1)


class ServerConfig(Section):
    aggregate: Literal["average", "distill"] = "average"
    distill: DistillConfig = DistillConfig()


class EvaluationConfig(Section):
    every: int = Field(default=1, ge=1, description="rounds between two evaluations; the last always is")
    ood: str | None = Field(default="glyphs", description="out-of-distribution set; null for none")
    coverage: float = Field(default=0.95, gt=0, le=1, description="share of answers that do not abstain")


Share = Literal["auto"] | Annotated[float, Field(ge=0)]


class ClientOverrides(Section):
    """What is special about one client, or about all whose id matches a pattern."""

    cpus: float | None = Field(default=None, ge=0)
    gpus: float | None = Field(default=None, ge=0)
    label_selector: Mapping[str, str] = Field(default={}, description="labels of the Ray node that it must live on")
    data: str | None = Field(default=None, description="folder with its own images.npy and labels.npy, on that node")


class ResourcesConfig(Section):
    client_cpus: Share = "auto"
    client_gpus: Share = "auto"
    server_cpus: Share = "auto"
    server_gpus: Share = "auto"
    actors: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="actors that share the clients; auto: one a client"
    )
    start_timeout_s: float = Field(default=120, gt=0)


class CheckpointConfig(Section):
    keep: int = Field(default=2, ge=1, description="checkpoints that stay on disk")


class Config(Section):
    name: str = Field(default="run", min_length=1)
    seed: int = Field(default=0, ge=0)
    method: Literal["fedppd"] = "fedppd"
    data: DataConfig = DataConfig()
    federation: FederationConfig = FederationConfig()
    client: ClientConfig = ClientConfig()
    teacher: TeacherConfig = TeacherConfig()
    student: StudentConfig = StudentConfig()
    server: ServerConfig = ServerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    clients: Mapping[str, ClientOverrides] = Field(default={}, description="by client id or pattern: client-0*")
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        info = _known_dataset("data.name", self.data.name)
        if info.adapts:
            raise ValueError(f"data.name: {info.name} is an out-of-distribution set; it can be evaluation.ood only")
        if self.evaluation.ood is not None:
            ood = _known_dataset("evaluation.ood", self.evaluation.ood)
            if not ood.adapts and ood.shape != info.shape:
                raise ValueError(f"evaluation.ood: {ood.name} has images {ood.shape}, {info.name} {info.shape}")
        part = self.data.partition
        if part.kind == "major_classes" and part.major > len(info.classes):
            raise ValueError(
                f"data.partition.major: {part.major} major classes, but {info.name} has only "
                f"{len(info.classes)} classes; choose at most {len(info.classes)}"
            )
        for key, network in (("teacher", self.teacher.network), ("student", self.student.network)):
            _check_network(f"{key}.network", network, info)
        if self.server.aggregate == "distill" and self.data.server_pool == 0:
            raise ValueError("data.server_pool: distillation on the server needs unlabelled rows; set it above 0")
        ids = client_ids(self.federation.clients)
        for pattern in self.clients:
            if not fnmatch.filter(ids, pattern):
                raise ValueError(f"clients.{pattern}: matches no client; ids are {ids[0]} to {ids[-1]}")
        return self

    @property
    def dataset(self) -> DatasetInfo:
        return CATALOG[self.data.name]

    def overrides_for(self, client: str) -> ClientOverrides:
        """Everything that `clients` says of this one; later patterns win."""
        merged: dict[str, Any] = {}
        for pattern, section in self.clients.items():
            if fnmatch.fnmatchcase(client, pattern):
                merged |= section.model_dump(exclude_unset=True)
        return ClientOverrides.model_validate(merged)

    def network_for(self, role: str) -> str:
        chosen = self.teacher.network if role == "teacher" else self.student.network
        return f"{self.dataset.family}_{role}" if chosen == "auto" else chosen


def client_ids(count: int) -> list[str]:
    """client-00, client-01, …: padded so that sorting by name is sorting by number."""
    width = max(2, len(str(count - 1)))
    return [f"client-{index:0{width}d}" for index in range(count)]


def _known_dataset(key: str, name: str) -> DatasetInfo:
    if name not in CATALOG:
        raise ValueError(f"{key}: unknown data set {name!r}{suggest(name, CATALOG)}")
    return CATALOG[name]


def _check_network(key: str, name: str, info: DatasetInfo) -> None:
    if name == "auto":
        return
    if name not in NETWORKS:
        raise ValueError(f"{key}: unknown network {name!r}{suggest(name, NETWORKS)}")
    takes = NETWORKS[name].input_shape
    if takes is not None and takes != info.shape:
        raise ValueError(f"{key}: {name} takes images {takes}, {info.name} has {info.shape}; use 'auto'")
    channels = NETWORKS[name].channels
    if channels is not None and channels != info.shape[0]:
        raise ValueError(f"{key}: {name} takes {channels} channels, {info.name} has {info.shape[0]}; use 'auto'")


def suggest(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(known))}"


def number_or_text(value: object) -> object:
    """YAML 1.1 reads 1e-4 as text; a user who writes it means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
