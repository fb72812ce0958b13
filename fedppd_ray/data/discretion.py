"""Errors about a client's rows, as they leave it: no path, no name of a file, no value. In full they stay there."""

import re
from pathlib import Path

from fedppd_ray.data.cache import cache_root

LOG = "clients.log"  # in the cache folder of the client's own machine
# What a table's reader says of one cell.
_CELL = re.compile(r"row \d+, column ('.*?'): .* (?=is none of |is not a number)", re.DOTALL)


def discreet(error: Exception, places: list[Path]) -> str:
    """The same in other words: whatever lies under these places is `a file`, the place itself `its data`."""
    text, whole = str(error), str(error)
    for place in places:
        absolute = place.expanduser().absolute()
        for path in sorted(absolute.rglob("*"), key=lambda path: len(str(path)), reverse=True):
            text = text.replace(str(path), "a file").replace(path.name, "a file")
        text = text.replace(str(absolute), "its data").replace(str(place), "its data")
    text = _CELL.sub(r"a row, column \1: a value ", text)
    cached = cache_root()
    if str(cached) in text:
        text = text.replace(str(cached), "its cache")
    if text != whole:
        _keep(whole)
        text += f"; {LOG} in the cache folder of its own machine says which"
    return text


def _keep(text: str) -> None:
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / LOG).open("a", encoding="utf-8") as handle:
            handle.write(text + "\n")
    except OSError:
        return  # a message is not worth a failure
