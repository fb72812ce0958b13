"""[1] Configuration: frozen models, unknown keys rejected, every error names its key and the remedy.

`load_config` reads YAML, applies `--set key=value` overrides and returns a `Config`. Pass the narrow section
on, not the whole.
"""

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

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
        number = _number_or(text)
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
        raise ValueError(f"{key}: unknown data set {name!r}{_suggest(name, CATALOG)}")
    return CATALOG[name]


def _check_network(key: str, name: str, info: DatasetInfo) -> None:
    if name == "auto":
        return
    if name not in NETWORKS:
        raise ValueError(f"{key}: unknown network {name!r}{_suggest(name, NETWORKS)}")
    takes = NETWORKS[name].input_shape
    if takes is not None and takes != info.shape:
        raise ValueError(f"{key}: {name} takes images {takes}, {info.name} has {info.shape}; use 'auto'")
    channels = NETWORKS[name].channels
    if channels is not None and channels != info.shape[0]:
        raise ValueError(f"{key}: {name} takes {channels} channels, {info.name} has {info.shape[0]}; use 'auto'")


def _suggest(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(known))}"


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key=value` overrides, validate. Raises ConfigError with one readable line."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not valid YAML ({reason})") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a {type(loaded).__name__}")
    values: dict[str, Any] = loaded or {}
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_readable(error.errors(), values)) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write key=value, for example --set federation.rounds=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: {text!r} is not a valid value") from None
    *parents, leaf = key.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent} is a value, not a section")
        node = child
    # YAML 1.1 reads 1e-4 as text; a user who types it means the number.
    node[leaf] = _number_or(value)


def _number_or(value: object) -> object:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _readable(errors: Sequence[ErrorDetails], values: Mapping[Any, Any]) -> str:
    """The first faulty key and what is wrong with it, in one line."""
    path = _key_path(errors[0], values)
    same = [error for error in errors if _key_path(error, values) == path]
    others = len({tuple(_key_path(error, values)) for error in errors}) - 1
    kind, key = errors[0]["type"], ".".join(path)
    if kind == "extra_forbidden":
        text = f"{key}: unknown key{_suggest(path[-1], _keys_beside(path))}"
    elif kind == "value_error":
        message = str(errors[0]["ctx"]["error"])
        text = message if not key else f"{key}: {message}"
    else:
        # Each member of a union has its own say: "should be 'auto' or should be …".
        message = " or ".join(error["msg"][0].lower() + error["msg"][1:] for error in same)
        text = f"{key}: {message} (got {errors[0]['input']!r})"
    return f"{text} (and {others} more)" if others else text


def _key_path(error: ErrorDetails, values: Mapping[Any, Any]) -> list[str]:
    """The error's place as keys of the file: pydantic appends the members of unions, which are none."""
    path: list[str] = []
    node: object = values
    for part in error["loc"]:
        if not isinstance(node, Mapping) or part not in node:
            break
        path.append(str(part))
        node = node[part]
    return path or [str(part) for part in error["loc"]]


def _keys_beside(path: Sequence[str]) -> list[str]:
    node: Any = Config
    for part in path[:-1]:
        is_section = isinstance(node, type) and issubclass(node, BaseModel)
        # Not a section: a mapping from any key to one.
        node = node.model_fields[part].annotation if is_section else get_args(node)[-1]
    return list(node.model_fields)


# Changing these does not change what an earlier round computed, so a resumed run may change them.
FREE_ON_RESUME = ("name", "federation.rounds", "resources", "checkpoint", "evaluation", "data.root")


def flatten(config: Config) -> dict[str, object]:
    """Dotted key → value, in a fixed order."""
    flat: dict[str, object] = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else key, value)
        else:
            flat[prefix] = node

    walk("", config.model_dump(mode="json"))
    return flat


def binding(config: Config) -> dict[str, object]:
    """The keys that a resumed run must share."""
    return {
        key: value
        for key, value in flatten(config).items()
        if not any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)
        # Where a client runs is free, what it learns from is not.
        and not (key.startswith("clients.") and not key.endswith(".data"))
    }


def config_hash(config: Config) -> str:
    text = json.dumps(binding(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def difference(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Readable lines `key: before -> after`."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]
