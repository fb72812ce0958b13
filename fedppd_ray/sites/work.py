"""What a site does with an offer: from a foreign configuration and weights to an update. No network here.

The configuration is data: names of what is installed here, and numbers. Where rows lie is this site's word alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedppd_ray.config.data import is_place
from fedppd_ray.config.file import parse_config
from fedppd_ray.config.names import own_names
from fedppd_ray.config.schema import Config
from fedppd_ray.errors import ConfigError
from fedppd_ray.evaluation.questions import Figures
from fedppd_ray.federation.types import ClientInfo, GlobalState
from fedppd_ray.inference.questions import Answer, Question
from fedppd_ray.sites import wire
from fedppd_ray.sites.home import Spooled
from fedppd_ray.sites.policy import Policy
from fedppd_ray.workers.client import ClientWorker

FIGURE = "site/"  # before the names of what a site found on rows of its own


@dataclass(frozen=True)
class Rows:
    """Where this site's rows are, and where those that it keeps for evaluation, if it does."""

    train: Path
    held_out: Path | None = None

    def fingerprint(self) -> str:
        """Changes with the files: an update that was made from other rows is not sent."""
        found = hashlib.sha256()
        for path in sorted(self.train.rglob("*")) if self.train.is_dir() else [self.train]:
            stat = path.stat()
            found.update(f"{path.relative_to(self.train)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return found.hexdigest()


def told_config(config: Config) -> dict[str, Any]:
    """What a coordinator tells sites of a run: no other client, no path, no resource of its own."""
    values = config.values()
    for key in ("clients", "resources", "checkpoint"):
        values.pop(key, None)
    values["data"] = {**values["data"], "root": None}
    if any(map(is_place, config.evaluation.ood_names)):
        values["evaluation"] = {**values["evaluation"], "ood": None}
    if own_names(config.clients):  # which are no business of any other client
        values["federation"] = {**values["federation"], "clients": 1}
    return values


def taken_config(values: Mapping[str, Any], client: str, rows: Rows) -> Config:
    """A foreign configuration, with this site's rows as the client's; ConfigError where it cannot be used."""
    data = values.get("data")
    own = {**values, "data": {**(data if isinstance(data, dict) else {}), "root": None}}
    place = {"data": str(rows.train)}
    if rows.held_out is not None:
        place["held_out"] = str(rows.held_out)
    own["clients"] = {client: place}
    for key in ("resources", "checkpoint"):
        own.pop(key, None)
    config = parse_config(own)
    if client not in config.client_names:
        raise ConfigError(f"{client[:40]!r} is no client of a run with {config.federation.clients}")
    return config


class Work:
    """The worker of one run, kept from round to round: networks and rows stay loaded."""

    def __init__(self, offer: wire.Offer, rows: Rows, device: str) -> None:
        self.config = taken_config(offer.config, offer.client, rows)
        self._client = offer.client
        self._worker = ClientWorker(self.config, [offer.client], device)

    def info(self) -> ClientInfo:
        return self._worker.describe()[0]

    def update(self, name: str, offer: wire.Offer, state: GlobalState, policy: Policy) -> Spooled:
        """What may leave of this round's work."""
        update = self._worker.local_update(self._client, state)
        metrics = dict(update.receipt.metrics) if policy.metrics else {}
        if policy.figures:
            found = self.answer(Figures(), state) or {}  # of the global student of the round before
            metrics |= {f"{FIGURE}{key}": float(value) for key, value in found.items()}
        finite = {key: float(value) for key, value in metrics.items() if np.isfinite(value)}
        content = wire.encode(update.models).content
        return Spooled(name, content, policy.told_rows(update.receipt.rows), finite)

    def cancel(self, round_id: int) -> None:
        self._worker.cancel(round_id)

    def answer(self, question: Question, state: GlobalState) -> Answer | None:
        """What this site says of rows that it keeps back."""
        return self._worker.answer(self._client, question, state)


def name_of_work(offer: wire.Offer, rows: Rows, policy: Policy) -> str:
    """Names all that an update depends on, and nothing else: the same name, the same bits."""
    parts = [offer.config, offer.client, offer.task.run, offer.task.round, offer.state.digest, rows.fingerprint()]
    text = json.dumps([*parts, policy.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def identity_of_run(offer: wire.Offer, rows: Rows) -> str:
    """Changes where a worker must be made anew."""
    text = json.dumps([offer.config, offer.client, offer.task.run, rows.fingerprint()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
