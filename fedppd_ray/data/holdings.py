"""What clients hold: their part of a named data set, or a folder of their own on the node where they live."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedppd_ray.config import Config, client_ids
from fedppd_ray.data.catalog import DatasetInfo
from fedppd_ray.data.datasets import Split, load
from fedppd_ray.data.partition import Rows, partition
from fedppd_ray.errors import DataError


class Holdings:
    """The rows of these clients, and of no others."""

    def __init__(self, config: Config, clients: Sequence[str]) -> None:
        self._info = config.dataset
        self._folders = {client: config.overrides_for(client).data for client in clients}
        common = [client for client, folder in self._folders.items() if folder is None]
        self._train: Split | None = None
        self._rows: dict[str, Rows] = {}
        if common:
            self._train = load(config.data.name, config.data.root).train
            self._rows = _rows_of(config, self._train, common)

    def of(self, client: str) -> Split:
        folder = self._folders[client]
        if folder is not None:
            return read_folder(Path(folder), self._info)
        if self._train is None:
            raise KeyError(client)
        rows = self._rows[client]
        return Split(self._train.images[rows], self._train.labels[rows])


def _rows_of(config: Config, train: Split, clients: Sequence[str]) -> dict[str, Rows]:
    everyone = client_ids(config.federation.clients)
    labels, classes = np.asarray(train.labels), len(config.dataset.classes)
    split = partition(labels, classes, config.data, len(everyone), config.seed)
    wanted = set(clients)
    return {client: rows for client, rows in zip(everyone, split.clients, strict=True) if client in wanted}


def read_folder(folder: Path, info: DatasetInfo) -> Split:
    """`images.npy` (uint8, N×H×W or N×H×W×C) and `labels.npy` (integers) of one client."""
    try:
        images = np.load(folder.expanduser() / "images.npy", mmap_mode="r")
        labels = np.load(folder.expanduser() / "labels.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{folder}: images.npy and labels.npy cannot be read here ({error})") from None
    channels, height, width = info.shape
    shape = (height, width) if channels == 1 and images.ndim == 3 else (height, width, channels)
    if images.dtype != np.uint8 or images.shape[1:] != shape or len(images) == 0:
        raise DataError(
            f"{folder}/images.npy: {images.dtype} {images.shape}, expected uint8 N×{'×'.join(map(str, shape))}"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(f"{folder}/labels.npy: {labels.dtype} {labels.shape}, expected {len(images)} integers")
    if labels.min() < 0 or labels.max() >= len(info.classes):
        raise DataError(f"{folder}/labels.npy: labels must be 0 to {len(info.classes) - 1}")
    pixels = images.reshape(len(images), height, width, channels).transpose(0, 3, 1, 2)
    return Split(pixels, labels.astype(np.int64))
