"""[1] Configuration: frozen models, unknown keys rejected, every error names its key and the remedy.

These are the sections that every run has. A method brings its own (`Method.Settings`): a configuration is made of both,
by `config_class`, so that a key which the chosen method does not read is as unknown as a misspelt one.
`config.file.load_config` makes a `Config` of a YAML file and `--set key=value` overrides. Pass the narrow section on,
not the whole.
"""

import fnmatch
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator

from fedppd_ray.config.client import ClientConfig, check_client
from fedppd_ray.config.conformal import ConformalConfig, check_shares
from fedppd_ray.config.data import DataConfig, check_corruptions, check_data, check_network
from fedppd_ray.config.names import check_names, own_names
from fedppd_ray.config.names import client_ids as client_ids
from fedppd_ray.config.nouns import AGGREGATIONS, FOLDER, METHODS, NETWORKS, SCORES, TRANSFORMS, DatasetInfo
from fedppd_ray.config.ood_flag import OodFlagConfig
from fedppd_ray.config.own_networks import brought, import_brought, is_own, open_networks
from fedppd_ray.config.section import Section
from fedppd_ray.config.table import TABLE
from fedppd_ray.errors import ConfigError
from fedppd_ray.registry import Registry, import_all, suggest

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
    clients: int = Field(default=10, ge=1, description="how many clients there are")
    rounds: int = Field(default=20, ge=1, description="rounds of the run; a resumed run may ask for more")
    participation: float = Field(default=1.0, gt=0, le=1, description="share of the clients in a round")
    quorum: float = Field(default=0.5, gt=0, le=1, description="share of a round's clients that must deliver")
    retries: int = Field(default=1, ge=0, description="second chances of a client within a round")
    deadline_s: float | None = Field(default=None, gt=0, description="seconds that a round waits for its clients")
    share_class_counts: bool | None = Field(
        default=None,
        description="whether the driver is told how many rows of each class a client has; null: only of rows that it "
        "dealt itself, not of clients' own",
    )
    aggregation: str = Field(default="mean", description="how the clients' models become one")
    server_momentum: float = Field(default=0.0, ge=0, lt=1, description="μ: share of its last step the server adds")


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
    ood: str | tuple[str, ...] | None = Field(
        default="glyphs", description="out-of-distribution set or path of one's own (with a /), or several; null: none"
    )
    coverage: float = Field(default=0.95, gt=0, le=1, description="share of answers that do not abstain")
    score: str = Field(
        default="entropy",
        description="how unsure a prediction is: what abstains, and detects OOD rows; auto: chosen on calibration rows",
    )
    corruptions: bool = Field(default=False, description="evaluate on test rows made worse, too")
    export: Literal["last", "best"] = Field(
        default="last", description="which round's student is exported; best: of the lowest NLL on calibration rows"
    )
    conformal: ConformalConfig = ConformalConfig()
    ood_flag: OodFlagConfig = OodFlagConfig()

    @field_validator("ood", mode="after")
    @classmethod
    def _one_or_several(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """A list of one is that one, an empty list is none."""
        if isinstance(value, tuple) and len(value) < 2:
            return value[0] if value else None
        return value

    @property
    def ood_names(self) -> tuple[str, ...]:
        if self.ood is None:
            return ()
        return (self.ood,) if isinstance(self.ood, str) else self.ood


ENTROPY = "entropy"  # the score that there always is
AUTO = "auto"  # evaluation.score: chosen on calibration rows and synthetic outliers
Share = Literal["auto"] | Annotated[float, Field(ge=0)]


class ClientOverrides(Section):
    """What is special about one client, or about all whose id matches a pattern."""

    cpus: float | None = Field(default=None, ge=0, description="cores that it asks for; null: as resources.client_cpus")
    gpus: float | None = Field(default=None, ge=0, description="share of a GPU; null: as resources.client_gpus")
    label_selector: Mapping[str, str] = Field(default={}, description="labels of the Ray node that it must live on")
    data: str | None = Field(default=None, description="folder with its own images.npy and labels.npy, on that node")
    held_out: str | None = Field(
        default=None,
        description="folder with rows that it keeps back and answers questions about; else see calibration",
    )
    site: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="the organisation that is this client, and joins over HTTPS from its own house",
    )


class ResourcesConfig(Section):
    client_cpus: Share = Field(default="auto", description="cores of a client; auto: so that all fit the cluster")
    client_gpus: Share = Field(default="auto", description="share of a GPU that a client has; auto: so that all fit")
    server_cpus: Share = Field(default="auto", description="cores of the server")
    server_gpus: Share = Field(default="auto", description="share of a GPU that the server has")
    actors: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="actors that share the clients; auto: one a client"
    )
    start_timeout_s: float = Field(default=120, gt=0, description="seconds that the actors have to start in")


class CheckpointConfig(Section):
    keep: int = Field(default=2, ge=1, description="checkpoints that stay on disk")


class Config(Section):
    """What every run has; its subclass for a method has that method's sections too."""

    name: str = Field(default="run", min_length=1, description="of the run, in reports and on the model card")
    seed: int = Field(default=0, ge=0, description="of all randomness: the same seed gives the same bits")
    method: str = Field(default="fedppd", description="which algorithm trains; `fedppd methods` lists them")
    data: DataConfig = DataConfig()
    federation: FederationConfig = FederationConfig()
    client: ClientConfig = ClientConfig()
    active: ActiveConfig | None = Field(default=None, description="active learning: train on labelled rows only")
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    clients: Mapping[str, ClientOverrides] = Field(
        default={}, description="by client: a name of its own, an id, or a pattern: client-0*"
    )
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        info, method = check_data(self.data, self.evaluation.ood_names), METHODS[self.method]
        _check_names(self)
        check_client(self.client, info)
        for role, choice in method.networks(self).items():
            check_network(role, choice, info)
        if info.table is not None and self.client.augment != "none":
            raise ValueError("client.augment: rows of a table cannot be cropped or flipped; set it to none")
        if info.table is not None and self.evaluation.score == AUTO:
            raise ValueError("evaluation.score: auto is chosen on outliers made of images; for a table name a score")
        if self.evaluation.corruptions:
            check_corruptions(info)
        check_shares(self.evaluation.conformal, info.classes)
        method.check(self)
        if self.data.server_pool == 0 and method.needs_pool(self.model_dump()):
            raise ValueError("data.server_pool: distillation on the server needs unlabelled rows; set it above 0")
        check_names(own_names(self.clients), self.federation.clients)
        ids = self.client_names
        for pattern in self.clients:
            if not fnmatch.filter(ids, pattern):
                raise ValueError(f"clients.{pattern}: matches no client; they are called {ids[0]} to {ids[-1]}")
        _check_sites(self)
        _check_own_rows(self)
        return self

    @property
    def dataset(self) -> DatasetInfo:
        return self.data.info

    @property
    def client_names(self) -> list[str]:
        """All clients, sorted: by the names that `clients` gives them, else client-00, client-01, …"""
        return own_names(self.clients) or client_ids(self.federation.clients)

    def shares_class_counts(self, client: str) -> bool:
        """Whether the driver may be told how many rows of each class this client has."""
        if self.federation.share_class_counts is not None:
            return self.federation.share_class_counts
        return self.data.partition.kind != "folders" and self.overrides_for(client).data is None

    def overrides_for(self, client: str) -> ClientOverrides:
        """Everything that `clients` says of this one; later patterns win."""
        merged: dict[str, Any] = {}
        for pattern, section in self.clients.items():
            if fnmatch.fnmatchcase(client, pattern):
                merged |= section.model_dump(exclude_unset=True)
        return ClientOverrides.model_validate(merged)

    def sites(self) -> dict[str, str]:
        """Client → the site that is this client, of those that are one."""
        if all(section.site is None for section in self.clients.values()):
            return {}
        named = {client: self.overrides_for(client).site for client in self.client_names}
        return {client: site for client, site in named.items() if site is not None}

    def network_for(self, role: str) -> str:
        """The name of the network of a role (teacher, student), of those that the method builds."""
        return str(METHODS[self.method].network_name(self, role))

    def values(self) -> dict[str, Any]:
        """All that this run reads, as a YAML file holds it: `parse_config` makes the same configuration of it."""
        values = self.model_dump(mode="json")
        for key in METHODS[self.method].unused(values):
            remove_key(values, key)
        return values

    def modules(self) -> list[str]:
        """The modules, other than the package's own, that registered what this configuration names."""
        choices = METHODS[self.method].networks(self)
        names: list[tuple[Registry[Any], str]] = [(METHODS, self.method)]
        # A score is chosen among all that there are.
        scores = {self.evaluation.score, self.evaluation.ood_flag.score}
        names += [(SCORES, name) for name in SCORES if scores & {AUTO, name}]
        names += [(AGGREGATIONS, self.federation.aggregation), *((TRANSFORMS, name) for name in self.client.transforms)]
        names += [(NETWORKS, self.dataset.network(role) if choice.network == "auto" else choice.network)
                  for role, choice in choices.items() if not is_own(choice.network)]  # fmt: skip
        brought = [registry.brought_by(name) for registry, name in names]
        return list(dict.fromkeys(module for module in brought if not module.startswith("fedppd_ray.")))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes it anew from its values: its class is made at run time and is in no module."""
        values = self.values()
        return _restored, (self.modules(), brought(values), values)


def _restored(modules: list[str], networks: list[tuple[str, str | None]], values: dict[str, Any]) -> Config:
    import_all(modules)
    import_brought(networks)
    open_networks(values)  # refuses a node whose source is another one
    return config_class(values["method"]).model_validate(values)


@cache
def config_class(method: str) -> type[Config]:
    """`Config` with the sections of this method; ValueError for a name that no method has."""
    settings = METHODS[method].Settings
    return create_model(f"{method}.Config", __base__=(settings, Config))


Settings = TypeVar("Settings", bound=Section)


def settings_of(config: Config, kind: type[Settings]) -> Settings:
    """A configuration as its method sees it."""
    if not isinstance(config, kind):
        raise TypeError(f"a configuration of method {config.method} has no {kind.__name__}")
    return config


def remove_key(values: dict[str, Any], key: str) -> object:
    """Take a dotted key out of nested dictionaries; None where it is not there."""
    *parents, leaf = key.split(".")
    node: Any = values
    for parent in parents:
        node = node.get(parent)
        if not isinstance(node, dict):
            return None
    return node.pop(leaf, None)


def _check_names(config: Config) -> None:
    for key, registry, names in (
        ("evaluation.score", SCORES, [config.evaluation.score] if config.evaluation.score != AUTO else []),
        ("evaluation.ood_flag.score", SCORES, [config.evaluation.ood_flag.score or ENTROPY]),
        ("federation.aggregation", AGGREGATIONS, [config.federation.aggregation]),
        ("client.transforms", TRANSFORMS, config.client.transforms),
    ):
        for name in names:
            if name not in registry:
                raise ValueError(f"{key}: unknown name {name!r}{suggest(name, list(registry))}")
    for key, value in (("export", "best"), ("score", AUTO)):
        if getattr(config.evaluation, key) == value and config.data.calibration == 0:
            raise ValueError(f"evaluation.{key}: {value} is chosen on calibration rows; set data.calibration above 0")


def _check_own_rows(config: Config) -> None:
    """`partition.kind: folders` says that clients bring their rows: from ROOT/clients, or as `clients` says."""
    own = [section for section in config.clients.values() if section.data is not None or section.site is not None]
    if config.data.partition.kind == "folders" and config.dataset.name not in (FOLDER, TABLE) and not own:
        raise ValueError(
            f"data.partition.kind: folders is for data.name: {FOLDER} and {TABLE}, not {config.dataset.name}; or say "
            f"where rows are, as clients: {{client-00: {{data: /data/hospital-a}}}}"
        )
    if config.data.kept_by_clients and config.evaluation.score == AUTO:
        raise ValueError(
            "evaluation.score: auto is chosen on rows of the coordinator's, and here the clients keep theirs; name a "
            "score, such as entropy"
        )


def _check_sites(config: Config) -> None:
    taken: dict[str, str] = {}
    for client, site in config.sites().items():
        if site in taken:
            raise ValueError(f"clients.{client}.site: {site} is {taken[site]} already; a site is one client")
        taken[site] = client
        own = config.overrides_for(client).model_dump(exclude_defaults=True)
        for key in ("cpus", "gpus", "label_selector", "data", "held_out"):
            if key in own:
                raise ValueError(f"clients.{client}.{key}: {site} is a site and decides that itself; remove it")
    if taken and config.active:
        raise ValueError("active: sites do not label rows for a study; remove it, or clients.*.site")


def number_or_text(value: object) -> object:
    """YAML 1.1 reads 1e-4 as text; a user who writes it means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
