"""[1] What clients are called: client-00, client-01, …, unless `clients` gives them names of their own."""

import re
from collections.abc import Iterable

_ID = re.compile(r"client-[0-9]+")
_NAME = re.compile(r"[^\W_]([\w -]{0,62}\w)?")
_SHOWN = 4


def client_ids(count: int) -> list[str]:
    """client-00, client-01, …: padded so that sorting by name is sorting by number."""
    width = max(2, len(str(count - 1)))
    return [f"client-{index:0{width}d}" for index in range(count)]


def is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


def own_names(keys: Iterable[str]) -> list[str]:
    """The names that these keys of `clients` give, sorted; none where all of them are ids, or patterns of names."""
    names = [key for key in keys if not set("*?[") & set(key)]
    return sorted(names) if not all(map(is_id, names)) else []


def check_names(names: Iterable[str], clients: int) -> None:
    """ValueError where clients have names of their own, but not all of them, or such as cannot be used."""
    names = list(names)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"clients.{name}: a client's name is of letters, digits, spaces, - and _, at most 64; rename it"
            )
    if names and len(names) != clients:
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        raise ValueError(
            f"federation.clients: {clients}, but clients has {len(names)} with names of their own ({shown}); set it to "
            f"{len(names)}, or name all of them"
        )
