"""[1] Configuration: frozen models, unknown keys rejected, every error names its key and the remedy.

`config_file.load_config` makes a `Config` of a YAML file and `--set key=value` overrides. Pass the narrow section
on, not the whole.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fedppd_ray.config_data import DataConfig, check_data, check_network
from fedppd_ray.config_section import Section
from fedppd_ray.data.catalog import DatasetInfo
from fedppd_ray.errors import ConfigError

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
    """The chain that samples. T = 1 is the Bayes posterior; the authors ran SGLD with T = 4/N."""

    network: str = "auto"
    pretrained: bool = Field(default=False, description="start from ImageNet weights (resnet18, resnet34)")
    sampler: Literal["sgld", "cyclical", "sghmc", "psgld"] = "sgld"
    rate: float = Field(default=0.045, gt=0, description="step size η; sghmc drifts by η/friction a step, others η/2")
    rate_step: int = Field(default=2, ge=1, description="StepLR: local epochs between two decays; not in cyclical")
    rate_gamma: float = Field(default=0.85, gt=0, le=1)
    temperature: RowScaled = "4/N"
    prior_precision: RowScaled = "1e-4*N"
    send: Literal["map", "last"] = "map"
    sampling_epochs: int | None = Field(
        default=None, ge=1, description="cyclical, psgld: last local epochs, which sample; null: half, rounded up"
    )
    friction: float = Field(default=0.1, gt=0, le=1, description="sghmc: share of the momentum that a step loses")
    preconditioner_decay: float = Field(default=0.99, ge=0, lt=1, description="psgld: memory of squared gradients")
    preconditioner_epsilon: float = Field(
        default=0.1, gt=0, description="psgld: added to a weight's gradient size relative to the mean one"
    )


class StudentConfig(Section):
    network: str = "auto"
    pretrained: bool = Field(default=False, description="start from ImageNet weights (resnet18, resnet34)")
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


class BaselineConfig(Section):
    """The clients' SGD in fedavg, fedbe, fedswag and fedpa; StepLR and decay as the teacher's."""

    network: Literal["teacher", "student"] = Field(default="teacher", description="whose network the baseline trains")
    rate: float | None = Field(default=None, gt=0, description="null: teacher.rate / 2, the drift of the chain")
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0)


class FedSWAGConfig(Section):
    """SWAG on the clients in the last round, 30 samples to predict."""

    rank: int = Field(default=20, ge=2, description="most deviations that a client keeps, one a local epoch")
    samples: int = Field(default=30, ge=1, description="networks that a prediction averages")


class FedPAConfig(Section):
    """Posterior averaging: FedAvg's clients, which send a delta that their covariance has corrected."""

    start_round: int = Field(default=1, ge=1, description="FedAvg before it")
    burn_in: int | None = Field(default=None, ge=0, description="local epochs before the first sample; null: half")
    shrinkage: float = Field(default=0.01, ge=0, description="ρ of the covariance estimate; 0 is FedAvg's delta")
    server_rate: float = Field(default=1.0, gt=0, description="the server's step along the mean delta")


class ActiveConfig(Section):
    """Federated active learning: what a client has labelled at first, and what it may have labelled later."""

    labelled: int = Field(default=400, ge=1, description="labelled rows of a client at the start")
    pool: int = Field(default=3200, ge=1, description="unlabelled rows of a client at the start")
    budget: int = Field(default=400, ge=1, description="rows that a client labels after each training")
    acquisition: Literal["entropy", "random"] = Field(default="entropy", description="how it chooses them")

    @property
    def trainings(self) -> int:
        """With the first labelled rows, and again after each acquisition until the pool is empty."""
        return 1 + -(-self.pool // self.budget)

    def require_rows(self, rows: int, client: str) -> None:
        if rows < self.labelled + self.pool:
            raise ConfigError(
                f"active: {client} holds {rows} rows, fewer than active.labelled + active.pool = "
                f"{self.labelled + self.pool}; lower them or raise data.partition.rows_per_client"
            )


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
    method: Literal["fedppd", "fedavg", "fedbe", "fedswag", "fedpa"] = "fedppd"
    data: DataConfig = DataConfig()
    federation: FederationConfig = FederationConfig()
    client: ClientConfig = ClientConfig()
    teacher: TeacherConfig = TeacherConfig()
    student: StudentConfig = StudentConfig()
    server: ServerConfig = ServerConfig()
    baseline: BaselineConfig = BaselineConfig()
    fedswag: FedSWAGConfig = FedSWAGConfig()
    fedpa: FedPAConfig = FedPAConfig()
    active: ActiveConfig | None = Field(default=None, description="active learning: train on labelled rows only")
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    clients: Mapping[str, ClientOverrides] = Field(default={}, description="by client id or pattern: client-0*")
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        info = check_data(self.data, self.evaluation.ood)
        check_network("teacher", self.teacher.network, self.teacher.pretrained, info)
        check_network("student", self.student.network, self.student.pretrained, info)
        if self.distils_on_server and self.data.server_pool == 0:
            raise ValueError("data.server_pool: distillation on the server needs unlabelled rows; set it above 0")
        if self.method == "fedpa" and (self.fedpa.burn_in or 0) >= self.client.epochs:
            raise ValueError(
                f"fedpa.burn_in: {self.fedpa.burn_in} of client.epochs={self.client.epochs} leaves no epoch to sample "
                f"in; lower it"
            )
        if self.method == "fedppd":
            _check_sampler(self.teacher, self.client.epochs)
        ids = client_ids(self.federation.clients)
        for pattern in self.clients:
            if not fnmatch.filter(ids, pattern):
                raise ValueError(f"clients.{pattern}: matches no client; ids are {ids[0]} to {ids[-1]}")
        return self

    @property
    def dataset(self) -> DatasetInfo:
        return self.data.info

    @property
    def distils_on_server(self) -> bool:
        return self.method == "fedbe" or (self.method == "fedppd" and self.server.aggregate == "distill")

    @property
    def exported_network(self) -> str:
        """The name of the network that is exported and served."""
        return self.network_for("student" if self.method == "fedppd" else self.baseline.network)

    def overrides_for(self, client: str) -> ClientOverrides:
        """Everything that `clients` says of this one; later patterns win."""
        merged: dict[str, Any] = {}
        for pattern, section in self.clients.items():
            if fnmatch.fnmatchcase(client, pattern):
                merged |= section.model_dump(exclude_unset=True)
        return ClientOverrides.model_validate(merged)

    def network_for(self, role: str) -> str:
        chosen = self.teacher.network if role == "teacher" else self.student.network
        return self.dataset.network(role) if chosen == "auto" else chosen

    def pretrained(self, role: str) -> bool:
        return self.teacher.pretrained if role == "teacher" else self.student.pretrained


def client_ids(count: int) -> list[str]:
    """client-00, client-01, …: padded so that sorting by name is sorting by number."""
    width = max(2, len(str(count - 1)))
    return [f"client-{index:0{width}d}" for index in range(count)]


# Which samplers a setting of the teacher belongs to; elsewhere it would be ignored in silence.
_SAMPLER_KEYS = {
    "sampling_epochs": ("cyclical", "psgld"),
    "friction": ("sghmc",),
    "preconditioner_decay": ("psgld",),
    "preconditioner_epsilon": ("psgld",),
}


def _check_sampler(teacher: TeacherConfig, epochs: int) -> None:
    for key, samplers in _SAMPLER_KEYS.items():
        changed = getattr(teacher, key) != TeacherConfig.model_fields[key].default
        if changed and teacher.sampler not in samplers:
            raise ValueError(
                f"teacher.{key}: teacher.sampler={teacher.sampler} has no use for it; "
                f"remove it or set teacher.sampler to {' or '.join(samplers)}"
            )
    if teacher.sampler not in _SAMPLER_KEYS["sampling_epochs"]:
        return
    if epochs < 2:
        raise ValueError(
            f"teacher.sampler: {teacher.sampler} explores before it samples, but client.epochs={epochs}; "
            f"set client.epochs to 2 or more, or teacher.sampler to sgld"
        )
    if teacher.sampling_epochs is not None and teacher.sampling_epochs >= epochs:
        raise ValueError(
            f"teacher.sampling_epochs: {teacher.sampling_epochs} of client.epochs={epochs} leaves {teacher.sampler} no "
            f"epoch to explore in; set it to at most {epochs - 1}"
        )


def number_or_text(value: object) -> object:
    """YAML 1.1 reads 1e-4 as text; a user who writes it means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
