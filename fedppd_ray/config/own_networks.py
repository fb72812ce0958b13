"""[1] Networks that users bring by the name of their code: `network: "my_package.nets:ScanNet"`.

To import is to run foreign code, so it matters who asks. A user's own command (`load_config`) imports what their file
names, from an installed package or from beside the file. Whoever opens values that came from elsewhere (a run folder,
an export, another site) imports only what $FEDPPD_ALLOW_NETWORKS, or the Serve configuration, allows by name.
The digest of the source goes into the configuration (`network_source`): another source is another network.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedppd_ray.config.nouns import NETWORKS, NetworkSpec
from fedppd_ray.errors import ConfigError

ALLOW = "FEDPPD_ALLOW_NETWORKS"
_ANY_SOURCE = "@any"
_allowed: set[str] = set()  # besides the environment's
_sources: dict[str, str] = {}  # name → digest, of what this process has imported
_places: dict[str, str] = {}  # name → the folder beside a configuration that it came from


def is_own(name: object) -> bool:
    return isinstance(name, str) and ":" in name


def source_of(name: str) -> str | None:
    """The digest of a network's source, where this process has imported it."""
    return _sources.get(name)


def allow(names: Iterable[str]) -> None:
    """Let this process import these, as $FEDPPD_ALLOW_NETWORKS does."""
    _allowed.update(names)


def bring_networks(values: dict[str, Any], folder: Path) -> None:
    """For a user's own command: import what the sections name, and note the digests of the sources."""
    for role, section in _sections(values):
        name = section["network"]
        _import(name, f"{role}.network", folder)
        section.setdefault("network_source", _sources[name])


def open_networks(values: Mapping[str, Any]) -> None:
    """For values from elsewhere: import what is allowed, and refuse the rest."""
    for role, section in _sections(values):
        source = open_network(section["network"], section.get("network_source"), f"{role}.network")
        section["network_source"] = source


def open_network(name: str, source: object, where: str) -> str:
    """The digest of the source that is used: the one asked for, unless any is allowed."""
    permitted = _permitted()
    if name not in _sources:
        if not {name, name + _ANY_SOURCE} & permitted:
            raise ConfigError(
                f"{where}: {name} is code outside of fedppd, which is imported only where it is allowed: "
                f"install it, look at it, and set {ALLOW}={name}"
            )
        _import(name, where, None)
    if source is not None and source != _sources[name] and name + _ANY_SOURCE not in permitted:
        raise ConfigError(
            f"{where}: the source of {name} here ({_sources[name][:12]}) is not the one that was used "
            f"({str(source)[:12]}); install that version, or accept the difference with {ALLOW}={name}{_ANY_SOURCE}"
        )
    return _sources[name]


def brought(values: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """What another process that is started for these values has to import: (name, folder beside the configuration)."""
    return [(section["network"], _places.get(section["network"])) for _, section in _sections(values)]


def import_brought(networks: Iterable[tuple[str, str | None]]) -> None:
    """In such a process."""
    for name, folder in networks:
        _import(name, "network", None if folder is None else Path(folder))


def _sections(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for role, section in values.items():
        if isinstance(section, dict) and is_own(section.get("network")):
            yield role, section


def _permitted() -> set[str]:
    return _allowed | {part.strip() for part in os.environ.get(ALLOW, "").split(",") if part.strip()}


def _import(name: str, where: str, folder: Path | None) -> None:
    if name in _sources:
        return
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f'{where}: {name!r} is not of the form "package.module:Class"')
    place = _beside(module_name, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises: one line that says whose it is
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{where}: {module_name} cannot be imported ({type(error).__name__}: {reason}); install it, put it on "
            f"PYTHONPATH, or beside the configuration"
        ) from error
    build = getattr(module, attribute, None)
    if not callable(build):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, type) and key[0] != "_")
        raise ConfigError(f"{where}: {module_name} has no {attribute}; it has {', '.join(known) or 'no class at all'}")
    _sources[name] = _digest(module.__file__)
    if place is not None:
        _places[name] = place
    NETWORKS.register(name, NetworkSpec(None, build, images=False), module_name)


def _beside(module: str, folder: Path | None) -> str | None:
    """Make a module that lies beside the configuration importable; what is installed comes first."""
    if folder is None:
        return None
    top = folder.absolute() / module.split(".")[0]
    if not (top.is_dir() or top.with_suffix(".py").is_file()):
        return None
    if str(top.parent) not in sys.path:
        sys.path.append(str(top.parent))
        importlib.invalidate_caches()
    return str(top.parent)


def _digest(file: str | None) -> str:
    """Of the module's file: what it imports in turn is not part of it."""
    if file is None:
        return "unknown"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
