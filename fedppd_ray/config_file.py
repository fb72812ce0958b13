"""[1] Reading a configuration: YAML, `--set key=value` overrides, and errors that people can act on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedppd_ray.config import Config, client_ids, number_or_text
from fedppd_ray.config_data import suggest
from fedppd_ray.data.catalog import FOLDER
from fedppd_ray.data.datasets import data_root
from fedppd_ray.data.folder import client_folders, describe_folder
from fedppd_ray.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key=value` overrides, validate. Raises ConfigError with one readable line."""
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
    for override in overrides:
        _apply_override(values, override)
    _look_into_folder(values)
    return parse_config(values)


def _look_into_folder(values: dict[str, Any]) -> None:
    """Write the facts of a user's own data set into the configuration, which then needs the folder no more."""
    data = values.get("data")
    if not isinstance(data, dict) or data.get("name") != FOLDER or data.get("folder") is not None:
        return
    root = data.get("root")
    if root is not None and not isinstance(root, str):
        return  # for the validation to refuse
    info = describe_folder(data_root(root))
    data["folder"] = {
        "classes": info.classes,
        "shape": info.shape,
        "mean": info.mean,
        "std": info.std,
        "networks": info.networks,
        "writers": info.writers,
    }
    found = client_folders(data_root(root))
    if found:
        _take_clients(values, data, found, data_root(root) / "clients")


def _take_clients(values: Mapping[str, Any], data: dict[str, Any], found: Sequence[str], place: Path) -> None:
    """ROOT/clients/<id> says who holds what: for every client, or there is no such folder at all."""
    part = data.get("partition") or {}
    if not isinstance(part, dict):
        return
    if part.setdefault("kind", "folders") != "folders":
        raise ConfigError(f"data.partition.kind: {place} says who holds what; set it to folders, not {part['kind']}")
    data["partition"] = part
    federation = values.get("federation")
    asked = federation.get("clients") if isinstance(federation, dict) else None
    expected = Config.model_fields["federation"].default.clients if asked is None else asked
    if expected != len(found):
        raise ConfigError(
            f"federation.clients: {expected}, but {place} has {len(found)} folders; set it to {len(found)}"
        )
    missing = [client for client in client_ids(len(found)) if client not in found]
    if missing:
        raise ConfigError(f"{place}: {missing[0]} has no folder; there must be one for every client, by its id")


def parse_config(values: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_readable(error.errors(), values)) from None


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


def _readable(errors: Sequence[ErrorDetails], values: Mapping[Any, Any]) -> str:
    """The first faulty key and what is wrong with it, in one line."""
    path = _key_path(errors[0], values)
    same = [error for error in errors if _key_path(error, values) == path]
    others = len({tuple(_key_path(error, values)) for error in errors}) - 1
    kind, key = errors[0]["type"], ".".join(path)
    if kind == "extra_forbidden":
        text = f"{key}: unknown key{suggest(path[-1], _keys_beside(path))}"
    elif kind == "value_error":
        message = str(errors[0]["ctx"]["error"])
        text = message if not key else f"{key}: {message}"
    else:
        # Each member of a union has its own say: "should be 'auto' or should be …".
        message = " or ".join(error["msg"][0].lower() + error["msg"][1:] for error in same)
        text = f"{key}: {message} (got {errors[0]['input']!r})"
    return f"{text} (and {others} more)" if others else text


def _key_path(error: ErrorDetails, values: Mapping[Any, Any]) -> list[str]:
    """The error's place as keys of the file: pydantic appends the members of unions, which are none."""
    path: list[str] = []
    node: object = values
    for part in error["loc"]:
        if not isinstance(node, Mapping) or part not in node:
            break
        path.append(str(part))
        node = node[part]
    return path or [str(part) for part in error["loc"]]


def _keys_beside(path: Sequence[str]) -> list[str]:
    node: Any = Config
    for part in path[:-1]:
        # Not a section: a mapping from any key to one.
        node = node.model_fields[part].annotation if _is_section(node) else get_args(node)[-1]
        # A section that may be null.
        node = next((member for member in get_args(node) if _is_section(member)), node) if _is_union(node) else node
    return list(node.model_fields)


def _is_section(node: object) -> bool:
    return isinstance(node, type) and issubclass(node, BaseModel)


def _is_union(node: object) -> bool:
    return get_origin(node) in (Union, UnionType)
