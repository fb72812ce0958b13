"""Errors about a client's rows, as they leave it: no path, no name of a file, no value. In full they stay there."""

import re
from pathlib import Path

from fedppd_ray.data.cache import cache_root

LOG = "clients.log"  # in the cache folder of the client's own machine
# What readers say of one cell of a table, of one label.
_CELL = re.compile(r"row \d+, column ('.*?'): .* (?=is none of |is not a number)", re.DOTALL)
_LABEL = re.compile(r", and row \d+ has -?\d+")
# Names that say nothing.
_PLAIN = ("images.npy", "labels.npy", "writers.npy", "dataset.json", "table.csv", "table.parquet")


def discreet(error: Exception, places: list[Path]) -> str:
    """The same in other words: what lies under these places is a file or a folder, the place itself is `its data`."""
    text, whole = str(error), str(error)
    for place in places:
        absolute = place.expanduser().absolute()
        for name in _PLAIN:
            text = text.replace(str(absolute / name), name)
        for path in sorted(absolute.rglob("*"), key=lambda path: len(str(path)), reverse=True):
            text = text.replace(str(path), "a folder" if path.is_dir() else "a file")
        text = text.replace(str(absolute), "its data").replace(str(place), "its data")
    text = _LABEL.sub("", _CELL.sub(r"a row, column \1: a value ", text)).replace(str(cache_root()), "its cache")
    if text != whole:
        _keep(whole)
        text += f" ({LOG} in the cache folder of its own machine says which)"
    return text


def _keep(text: str) -> None:
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / LOG).open("a", encoding="utf-8") as handle:
            handle.write(text + "\n")
    except OSError:
        return  # a message is not worth a failure
