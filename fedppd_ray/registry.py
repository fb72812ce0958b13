"""Open nouns: methods, networks, data sets, scores and the like, each found by name in a registry of its own.

What comes with the package is registered like what users add: a registry imports its built-in module, and the plugins,
when it is first asked. So the configuration can check a name without knowing who brings it, and a new method touches no
file of the package. Plugins are modules named in $FEDPPD_PLUGINS (with commas) and entry points of installed packages
in the group `fedppd_ray.plugins`; nothing that a configuration or a run folder says makes a process import code.
"""

import difflib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from fedppd_ray.errors import ConfigError

PLUGINS = "FEDPPD_PLUGINS"
Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Name → item. `noun` is what messages call an item, `built_in` the module that registers those of the package."""

    def __init__(self, noun: str, built_in: str) -> None:
        self._noun = noun
        self._built_in = built_in
        self._items: dict[str, Item] = {}
        self._modules: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, item: Item, module: str) -> None:
        """`module` is where the item is defined: other processes of a run import it to find the name."""
        if self._items.get(name, item) is not item and self._modules[name] != module:
            raise ConfigError(f"{self._noun} {name!r} is registered twice, by {self._modules[name]} and by {module}")
        self._items[name] = item
        self._modules[name] = module

    def __getitem__(self, name: str) -> Item:
        self._load()
        if name not in self._items:
            raise ValueError(f"unknown {self._noun} {name!r}{suggest(name, self._items)}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(list(self._items))

    def brought_by(self, name: str) -> str:
        """The module that registered this name."""
        self._load()
        return self._modules[name]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            importlib.import_module(self._built_in)
            load_plugins()


@cache
def load_plugins() -> None:
    """Import, once per process, what installed packages and the environment name."""
    for point in entry_points(group="fedppd_ray.plugins"):
        _import(point.module, f"the entry point {point.name} in group fedppd_ray.plugins")
    for module in filter(None, (part.strip() for part in os.environ.get(PLUGINS, "").split(","))):
        _import(module, f"${PLUGINS}")


def import_all(modules: Sequence[str]) -> None:
    """The modules that registered what a configuration names, in a process that was started for it."""
    for module in modules:
        _import(module, "the configuration that this process was given")


def _import(module: str, source: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module}: cannot be imported ({error}), but {source} names it; install it there, or put it on PYTHONPATH"
        ) from None


def suggest(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(known))}"
