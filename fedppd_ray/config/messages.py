"""[1] What is wrong with a configuration, in one line that names the key and the remedy."""

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import config_class
from fedppd_ray.registry import suggest


def readable(errors: Sequence[ErrorDetails], values: Mapping[Any, Any], method: str) -> str:
    """The first faulty key and what is wrong with it."""
    path = _key_path(errors[0], values)
    same = [error for error in errors if _key_path(error, values) == path]
    others = len({tuple(_key_path(error, values)) for error in errors}) - 1
    kind, key = errors[0]["type"], ".".join(path)
    if kind == "extra_forbidden":
        text = f"{key}: {_unknown(path, method)}"
    elif kind == "value_error":
        message = str(errors[0]["ctx"]["error"])
        text = message if not key else f"{key}: {message}"
    else:
        # Each member of a union has its own say: "should be 'auto' or should be …".
        message = " or ".join(error["msg"][0].lower() + error["msg"][1:] for error in same)
        text = f"{key}: {message} (got {errors[0]['input']!r})"
    return f"{text} (and {others} more)" if others else text


def _unknown(path: Sequence[str], method: str) -> str:
    readers = methods_reading(path)
    if readers:
        return f"method {method} does not read it ({', '.join(readers)}: yes); remove it, or set method"
    return f"unknown key{suggest(path[-1], _keys_beside(path, method))}"


def methods_reading(path: Sequence[str]) -> list[str]:
    """The methods whose configuration has this key."""
    return [name for name in METHODS if path[-1] in _keys_beside(path, name)]


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


def _keys_beside(path: Sequence[str], method: str) -> list[str]:
    """The keys of the section that this key is in; none where the method has no such section."""
    node: Any = config_class(method)
    for part in path[:-1]:
        if _is_section(node):
            if part not in node.model_fields:
                return []
            node = node.model_fields[part].annotation
        else:  # a mapping from any key to a section
            node = get_args(node)[-1] if get_args(node) else None
        # A section that may be null.
        node = next((member for member in get_args(node) if _is_section(member)), node) if _is_union(node) else node
    return list(node.model_fields) if _is_section(node) else []


def _is_section(node: object) -> bool:
    return isinstance(node, type) and issubclass(node, BaseModel)


def _is_union(node: object) -> bool:
    return get_origin(node) in (Union, UnionType)
