"""[1] Reading a configuration: YAML, `--set key=value` overrides, and errors that people can act on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedppd_ray.config import Config, number_or_text, suggest
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
    return parse_config(values)


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
        is_section = isinstance(node, type) and issubclass(node, BaseModel)
        # Not a section: a mapping from any key to one.
        node = node.model_fields[part].annotation if is_section else get_args(node)[-1]
    return list(node.model_fields)
