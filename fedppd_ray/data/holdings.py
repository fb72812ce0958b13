"""What clients hold: their part of a data set, or a folder of their own on the node where they live."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.config.schema import Config
from fedppd_ray.data.cache import data_root
from fedppd_ray.data.datasets import Dataset, load, prepare, prepare_ood
from fedppd_ray.data.discretion import discreet
from fedppd_ray.data.folder import read_folder
from fedppd_ray.data.mapped import rows_of
from fedppd_ray.data.partition import Indices, Partition, partition
from fedppd_ray.data.parts import PartName, Split
from fedppd_ray.data.readers import tables
from fedppd_ray.data.readers.images import summary
from fedppd_ray.data.table import read_table_file
from fedppd_ray.errors import DataError
from fedppd_ray.seeding import numpy_generator_for

log = logging.getLogger(__name__)


def prepare_data(config: Config) -> None:
    """Parse ahead of a run all that it will read here, and deal the rows once.

    What is missing is missed, and what cannot be dealt refused, before the first round.
    """
    info = config.dataset
    parts: tuple[PartName, ...] = ("train", "test") if needs_train(config) else ("test",)
    prepare(config.data.name, config.data.root, parts, info)
    for part in parts:
        if left_out := summary(getattr(dataset_of(config), part).skipped):
            log.warning("%s: %s", part, left_out)
    if needs_train(config):
        dealt = partition_of(config, dataset_of(config).train).clients
        for client, rows in zip(config.client_names, dealt, strict=False):
            if config.active and folder_of(config, client) is None:
                config.active.require_rows(len(rows), client)
    for ood in config.evaluation.ood_names:
        try:
            prepare_ood(ood, info, config.data.root)
        except DataError as error:
            raise DataError(
                f"evaluation.ood: {error}; or set evaluation.ood to glyphs or noise, which need no file"
            ) from None


def dataset_of(config: Config) -> Dataset:
    return load(config.data.name, config.data.root, config.dataset)


def needs_train(config: Config) -> bool:
    """Whether rows of the common training part are used: not where clients bring theirs and the server keeps none."""
    data = config.data
    return (
        data.partition.kind != "folders" or data.server_pool > 0 or not (data.kept_by_clients or data.calibration == 0)
    )


def partition_of(config: Config, train: Split) -> Partition:
    """Who holds which rows of the common training part; nobody, where each client has a folder."""
    clients = 0 if config.data.partition.kind == "folders" else config.federation.clients
    labels, classes = np.asarray(train.labels), len(config.dataset.classes)
    return partition(labels, classes, config.data, clients, config.seed, train.writers)


class Holdings:
    """The rows of these clients, and of no others."""

    def __init__(self, config: Config, clients: Sequence[str]) -> None:
        self._config, self._info = config, config.dataset
        self._folders = {client: folder_of(config, client) for client in clients}
        common = {client for client, folder in self._folders.items() if folder is None}
        self._train: Split | None = None
        self._rows: dict[str, Indices] = {}
        if common:
            self._train = dataset_of(config).train
            shares = zip(config.client_names, partition_of(config, self._train).clients, strict=True)
            self._rows = {client: rows for client, rows in shares if client in common}

    def of(self, client: str) -> Split:
        """The rows that it trains on.

        Read on the node where the client lives, before the first round: what is wrong there names the client.
        """
        return self._parts(client)[0]

    def kept_back(self, client: str) -> Split:
        """The rows that it keeps back and answers questions about; none of them is trained on."""
        return self._parts(client)[1]

    def left_out(self, client: str) -> str:
        """How many of its files could not be used, and why; "" for none. Their names stay with the client."""
        return summary(self._read(client).skipped)

    def _parts(self, client: str) -> tuple[Split, Split]:
        elsewhere = self._config.overrides_for(client).held_out
        try:
            own = self._read(client)
            if elsewhere is not None:
                return own, read_own(Path(elsewhere), self._info)
        except (DataError, OSError) as error:
            places = [Path(place) for place in (self._folders[client], elsewhere) if place is not None]
            raise DataError(f"{client}: {discreet(error, places)}") from None
        kept = self._config.data.kept_rows(len(own)) if self._folders[client] is not None else 0
        if kept == 0:
            return own, _rows_of(own, np.empty(0, np.int64))
        order = numpy_generator_for(self._config.seed, "kept_back", client=client).permutation(len(own))
        return _rows_of(own, np.sort(order[kept:])), _rows_of(own, np.sort(order[:kept]))

    def _read(self, client: str) -> Split:
        folder = self._folders[client]
        if folder is not None:
            return read_own(folder, self._info)
        if self._train is None:
            raise KeyError(client)
        return _rows_of(self._train, self._rows[client])


def _rows_of(split: Split, rows: Indices) -> Split:
    return Split(rows_of(split.images, rows), split.labels[rows])


def read_own(place: Path, info: DatasetInfo) -> Split:
    """Rows that somebody brings, in the form of this data set: a folder of images, or a table."""
    return read_table_file(place, info) if info.table is not None else read_folder(place, info)


def folder_of(config: Config, client: str) -> Path | None:
    """The folder of a client that has its own rows."""
    own = config.overrides_for(client).data
    if own is not None:
        return Path(own)
    if config.data.partition.kind == "folders":
        place = data_root(config.data.root) / "clients"
        if config.dataset.table is not None:
            return tables.find(place, client) or place / f"{client}.csv"
        return place / client
    return None
