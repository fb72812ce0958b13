"""[1] Reading a configuration: YAML, `--set key=value` overrides, and errors that people can act on."""

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedppd_ray.config.messages import readable
from fedppd_ray.config.names import client_ids, is_id, own_names
from fedppd_ray.config.nouns import METHODS, OWN_DATA
from fedppd_ray.config.own_networks import bring_networks, open_networks
from fedppd_ray.config.schema import Config, config_class, number_or_text
from fedppd_ray.config.stored import restricted, upgraded
from fedppd_ray.config.table import SHIFTED, TABLE
from fedppd_ray.errors import ConfigError
from fedppd_ray.registry import suggest

# A section that only `fedppd compare` reads: settings of the methods beside the one that the file is about.
COMPARE = "compare"
Overrides = Sequence[str] | Mapping[str, object]  # "key=value" as the command line has them, or key → value


def load_config(path: Path | str, overrides: Overrides = ()) -> Config:
    """Read a configuration, change some of its keys, and check that all of it fits together.

    Parameters: `path`, a YAML file or the name of one that comes with the package ("quickstart"); `overrides`, dotted
    keys with their values, as a mapping or as `key=value` lines. Raises ConfigError with one readable line.
    """
    values = _read(path, overrides)
    values.pop(COMPARE, None)
    bring_networks(values, find_config(path).parent)
    return parse_config(values)


def load_for_method(path: Path | str, overrides: Overrides, changes: Sequence[str]) -> Config:
    """A configuration as one method of a comparison takes it.

    The file's own sections and its `compare` section, with the overrides and then the method's `changes`; of these what
    the method reads. Rows of a pool that it has no use for are reserved: every method's clients hold the same rows.
    """
    values = _read(path, overrides)
    beside = values.pop(COMPARE, None) or {}
    if not isinstance(beside, dict):
        raise ConfigError(f"{COMPARE}: must be a section, of settings for other methods")
    values = _merged(beside, values)
    for change in (*override_lines(overrides), *changes):
        _apply_override(values, change)
    bring_networks(values, find_config(path).parent)
    return parse_config(restricted(values, _method_of(values)))


def load_stored(path: Path, overrides: Overrides = ()) -> Config:
    """The configuration of a run folder, whichever version wrote it, with some of its keys changed."""
    values = _read(path, ())
    values = upgraded(values, _method_of(values))
    for override in override_lines(overrides):
        _apply_override(values, override)
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> Config:
    """Check values as a YAML file holds them; a key that the chosen method does not read is refused.

    Of networks that users bring, only those are imported that are allowed (`config.own_networks`).
    """
    method = _method_of(values)
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    open_networks(values)
    try:
        config = config_class(method).model_validate(values)
    except ValidationError as error:
        raise ConfigError(readable(error.errors(), values, method)) from None
    for key, why in METHODS[method].unused(values).items():
        if _given(values, key):
            raise ConfigError(f"{key}: {why}; remove it")
    if config.data.server_pool and not METHODS[method].needs_pool(values):
        raise ConfigError(
            f"data.server_pool: nobody uses these {config.data.server_pool} rows: method {method}, as it is set here, "
            f"does not distil on the server; remove it"
        )
    return config


def _method_of(values: Mapping[str, Any]) -> str:
    name = values.get("method", Config.model_fields["method"].default)
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"method: unknown method {name!r}{suggest(str(name), list(METHODS))}")
    return name


def _given(values: Mapping[str, Any], key: str) -> object:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


# ---- files


def find_config(path: Path | str) -> Path:
    """A file, or the one of this name that comes with the package: `quickstart` for configs/quickstart.yaml."""
    given = Path(path)
    if given.exists() or given.suffix or len(given.parts) != 1:
        return given
    for folder in _shipped():
        if (found := folder / f"{given.name}.yaml").exists():
            return found
    known = shipped_names()
    raise ConfigError(f"{path}: neither a file nor a configuration that comes with fedppd{suggest(str(path), known)}")


def shipped_names() -> list[str]:
    """The configurations that come with the package, by name."""
    return sorted({file.stem for folder in _shipped() for file in folder.glob("*.yaml")})


def _shipped() -> list[Path]:
    """Where the configurations of the package are: in a checkout beside it, else where the wheel put them."""
    beside = Path(__file__).parents[2] / "configs"
    installed = Path(sysconfig.get_path("data")) / "share" / "fedppd_ray" / "configs"
    return [folder for folder in (beside, installed) if folder.is_dir()]


def _read(path: Path | str, overrides: Overrides) -> dict[str, Any]:
    path = find_config(path)
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not valid YAML ({reason})") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a {type(loaded).__name__}")
    values: dict[str, Any] = loaded or {}
    for override in override_lines(overrides):
        _apply_override(values, override)
    _look_into_own_data(values)
    _count_names(values)
    _no_partition(values)
    return values


def override_lines(overrides: Overrides) -> list[str]:
    """Overrides as the command line has them: `key=value`."""
    if isinstance(overrides, Mapping):
        return [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in overrides.items()]
    return list(overrides)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write key=value, for example --set federation.rounds=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: {text!r} is not a valid value") from None
    *parents, leaf = key.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent} is a value, not a section")
        node = child
    # YAML 1.1 reads 1e-4 as text; a user who types it means the number.
    node[leaf] = number_or_text(value)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section; `changes` win."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _count_names(values: dict[str, Any]) -> None:
    """There are as many clients as have names of their own."""
    clients = values.get("clients")
    names = own_names(map(str, clients)) if isinstance(clients, dict) else []
    if names and isinstance(federation := values.setdefault("federation", {}), dict):
        federation.setdefault("clients", len(names))


def _no_partition(values: dict[str, Any]) -> None:
    """Where every client has rows of its own, none are dealt."""
    data = values.setdefault("data", {}) if _own_places(values, sites=True) else None
    part = data.setdefault("partition", {}) if isinstance(data, dict) else None
    if isinstance(part, dict):
        part.setdefault("kind", "folders")


def _own_places(values: Mapping[str, Any], sites: bool = False) -> dict[str, str]:
    """Client → where its rows are, if every client has a place of its own; with `sites`, or is a site."""
    clients, federation = values.get("clients"), values.get("federation")
    if not isinstance(clients, dict):
        return {}
    sections = {str(name): own for name, own in clients.items() if not set("*?[") & set(str(name))}
    wanted = federation.get("clients") if isinstance(federation, dict) else None
    keys = ("data", "site") if sites else ("data",)
    places = {name: next((own[key] for key in keys if own.get(key)), None)
              for name, own in sections.items() if isinstance(own, dict)}  # fmt: skip
    if wanted is None:
        wanted = len(own_names(sections)) or Config.model_fields["federation"].default.clients
    complete = len(places) == wanted and all(isinstance(place, str) for place in places.values())
    return {name: str(place) for name, place in places.items()} if complete else {}


# ---- a user's own data


def _look_into_own_data(values: dict[str, Any]) -> None:
    """Write the facts of a user's own data set into the configuration, which then needs its files no more."""
    data = values.get("data")
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(data, dict) or name not in OWN_DATA:
        return
    data.setdefault("calibration", "auto")
    given = data.get(str(name))
    if given is not None and (not isinstance(given, dict) or not OWN_DATA[str(name)].incomplete(given)):
        return
    root = data.get("root")
    if root is not None and not isinstance(root, str):
        return  # for the validation to refuse
    kind = OWN_DATA[str(name)]
    place = kind.place(root)
    if places := _own_places(values):
        data[str(name)] = dict(kind.from_clients(places, place, data))
        _suit_own_data(values, data, str(name))
        return
    data[str(name)] = dict(kind.describe(place, data))
    _suit_own_data(values, data, str(name))
    if data[str(name)].get("embedded"):
        return
    if found := kind.clients(place):
        _take_clients(values, data, found, place / "clients")


def _suit_own_data(values: dict[str, Any], data: dict[str, Any], name: str) -> None:
    """Defaults that are meant for known images, where nothing is said of them."""
    evaluation = values.setdefault("evaluation", {})
    if isinstance(evaluation, dict):
        evaluation.setdefault("ood", SHIFTED if data[name].get("embedded") else None)
    people = data[name].get("clients") if name == TABLE else None
    if not people:
        return
    part = data.setdefault("partition", {})
    if isinstance(part, dict):
        part.setdefault("kind", "column")
    federation = values.setdefault("federation", {})
    if isinstance(federation, dict) and isinstance(part, dict) and part.get("kind") == "column":
        count = federation.setdefault("clients", len(people))
        if count != len(people):
            raise ConfigError(
                f"federation.clients: {count}, but column {data[TABLE]['client_column']!r} names {len(people)}; "
                f"set it to {len(people)}, or data.partition.kind to iid or dirichlet"
            )


def _take_clients(values: dict[str, Any], data: dict[str, Any], found: Sequence[str], place: Path) -> None:
    """ROOT/clients/<id> says who holds what: for every client, or there is no such folder at all."""
    part = data.get("partition") or {}
    if not isinstance(part, dict):
        return
    if part.setdefault("kind", "folders") != "folders":
        raise ConfigError(f"data.partition.kind: {place} says who holds what; set it to folders, not {part['kind']}")
    data["partition"] = part
    federation, given = values.setdefault("federation", {}), values.get("clients") or {}
    if not isinstance(federation, dict) or not isinstance(given, dict):
        return  # for the validation to refuse
    expected = federation.setdefault("clients", len(found))
    if expected != len(found):
        raise ConfigError(
            f"federation.clients: {expected}, but {place} has {len(found)} folders; set it to {len(found)}"
        )
    names = [] if any(map(is_id, found)) else own_names(found)
    if missing := [client for client in names or client_ids(len(found)) if client not in found]:
        raise ConfigError(f"{place}: {missing[0]} has no folder; there must be one for every client, by its id")
    if strange := [name for name in own_names(given) if name not in found]:
        raise ConfigError(f"clients.{strange[0]}: {place} has no folder of this name; the names are {', '.join(found)}")
    if names:
        values["clients"] = {**{name: {} for name in names}, **given}
