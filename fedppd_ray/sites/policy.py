"""The site decides: what it will run, and what may leave its house. A YAML file that a privacy officer can read."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import Config
from fedppd_ray.config.section import Section
from fedppd_ray.errors import ConfigError
from fedppd_ray.sites.wire import rounded_rows

TEMPLATE = """\
# What this site takes part in, and what may leave it. Anything else is refused, with the reason on both ends.
methods: any            # or a list of their names: [fedppd]
networks: any           # or a list: [mnist_teacher, mnist_student]
transforms: []          # what an update must pass before it leaves, such as clipping; in this order
most_epochs: 50         # of one round
most_rounds: 1000       # of one run
most_releases: null     # updates that may leave in all, over every run; null: no limit
fewest_rows: 10         # with fewer rows of its own it does not take part: a model would give them away
pretrained: false       # whether published weights may be fetched from the internet
rows: exact             # the row count that the coordinator is told: exact, rounded, or a number
class_counts: false     # whether it may be told how many rows of each class there are
metrics: false          # whether the training loss and the like may leave
figures: false          # whether accuracy and calibration on held-out rows of this site may leave
"""


class Policy(Section):
    methods: Literal["any"] | tuple[str, ...] = "any"
    networks: Literal["any"] | tuple[str, ...] = "any"
    transforms: tuple[str, ...] = Field(default=(), description="that an update must pass, in this order")
    most_epochs: int = Field(default=50, ge=1)
    most_rounds: int = Field(default=1000, ge=1)
    most_releases: int | None = Field(default=None, ge=0)
    fewest_rows: int = Field(default=10, ge=1)
    pretrained: bool = False
    rows: Literal["exact", "rounded"] | int = "exact"
    class_counts: bool = False
    metrics: bool = False
    figures: bool = False

    def refusal(self, config: Config, rows: int, releases: int) -> str | None:
        """Why this site does not take part in such a run, or None; `releases`: updates that have left so far."""
        if why := self.refusal_of(config):
            return why
        if rows < self.fewest_rows:
            return f"fewest_rows: {self.fewest_rows}, and it holds fewer"
        if self.most_releases is not None and releases >= self.most_releases:
            return f"most_releases: {self.most_releases}, and that many updates have left"
        return None

    def refusal_of(self, config: Config) -> str | None:
        """The same, as far as it can be said before anything is built or read."""
        method = METHODS[config.method]
        if self.methods != "any" and config.method not in self.methods:
            return f"methods: {config.method} is not among {', '.join(self.methods)}"
        for role, choice in method.networks(config).items():
            name = method.network_name(config, role)
            if self.networks != "any" and name not in self.networks:
                return f"networks: {name} is not among {', '.join(self.networks)}"
            if choice.pretrained and not self.pretrained:
                return "pretrained: published weights may not be fetched"
        if config.client.epochs > self.most_epochs:
            return f"most_epochs: {self.most_epochs}, the run asks for {config.client.epochs}"
        if config.federation.rounds > self.most_rounds:
            return f"most_rounds: {self.most_rounds}, the run has {config.federation.rounds}"
        if self.transforms and config.client.transforms != self.transforms:
            return f"transforms: an update must pass {', '.join(self.transforms)}, and nothing else"
        if config.active is not None:
            return "active: rows are not labelled for a study"
        return None

    def told_rows(self, rows: int) -> int:
        """The row count that leaves: what the average weighs this site by."""
        if self.rows == "exact":
            return rows
        return rounded_rows(rows) if self.rows == "rounded" else int(self.rows)


def load_policy(path: Path) -> Policy:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); `fedppd site init` writes one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid YAML ({' '.join(str(error).split())})") from None
    return parse_policy(values, str(path))


def parse_policy(values: Any, name: str) -> Policy:
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: must hold `key: value` lines")
    try:
        policy = Policy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{name}: {key}: unknown key; known are {', '.join(Policy.model_fields)}") from None
        raise ConfigError(f"{name}: {key}: {first['msg']}") from None
    if not isinstance(policy.rows, str) and (isinstance(policy.rows, bool) or policy.rows < 1):
        raise ConfigError(f"{name}: rows: exact, rounded, or a number above 0")
    return policy
