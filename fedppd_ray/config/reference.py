"""[1] Every key of a configuration: what it takes, its default and what it is, read off the models themselves.

`fedppd config` prints it, and docs/config.md is made of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from fedppd_ray.config.nouns import METHODS
from fedppd_ray.config.schema import config_class
from fedppd_ray.config.section import Section

_BOUNDS = (
    (annotated_types.Ge, "ge", "≥"),
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Le, "le", "≤"),
    (annotated_types.Lt, "lt", "<"),
)
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """A key; `methods` are those that read it, in the order of the registry."""

    name: str
    values: str
    default: str
    description: str
    methods: tuple[str, ...]

    @property
    def section(self) -> str:
        return self.name.partition(".")[0] if "." in self.name else ""


def built_in_methods() -> list[str]:
    """Those of the package, without plugins."""
    return [name for name in METHODS if METHODS.brought_by(name).startswith("fedppd_ray.")]


def all_keys(methods: Sequence[str]) -> list[Key]:
    """The keys that these methods read, section by section in the order of a file."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for method in methods:
        for name, field in _walk(config_class(method), ""):
            key = (name, _values(field.annotation, field.metadata), _default(field), field.description or "")
            found.setdefault(key, []).append(method)
    keys = [Key(*key, tuple(readers)) for key, readers in found.items()]
    sections = list(dict.fromkeys(key.section for key in keys))
    return sorted(keys, key=lambda key: sections.index(key.section))


def matching(keys: Sequence[Key], prefix: str) -> list[Key]:
    """A key by its name, or all of a section."""
    return [key for key in keys if key.name == prefix or key.name.startswith(f"{prefix}.")]


def as_markdown(keys: Sequence[Key], methods: Sequence[str]) -> str:
    """docs/config.md: a table per section."""
    lines = [
        "# Every key of a configuration",
        "",
        "Made by `make docs`; a test keeps it equal to the code. A configuration is one YAML file; what is not in it",
        "has its default. Unknown keys, and keys that the chosen method does not read, are refused. `fedppd config`",
        "prints the same, `fedppd config federation.quorum` one key; a run folder has a file with every key and its",
        "value. A section `compare` is read by `fedppd compare` alone: settings of the methods beside the one that the",
        "file is about.",
    ]
    for section in dict.fromkeys(key.section for key in keys):
        lines += ["", f"## `{section}`" if section else "## Of the run", "", "| key | values | default | |"]
        lines.append("|---|---|---|---|")
        for key in keys:
            if key.section == section:
                only = "" if len(key.methods) == len(methods) else f" *({', '.join(key.methods)})*"
                cells = (f"`{key.name}`", key.values, f"`{key.default}`", key.description + only)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of everything that is no section itself."""
    for name, field in section.model_fields.items():
        below = list(_sections(field.annotation))
        if not below:
            yield f"{prefix}{name}", field
        for kind, mark in below:
            yield from _walk(kind, f"{prefix}{name}{mark}.")


def _sections(annotation: Any) -> Iterator[tuple[type[Section], str]]:
    """The sections that a field is made of, and what stands between its name and theirs."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
        return
    origin = get_origin(annotation)
    mark = "[]" if origin is tuple else ".<id>" if isinstance(origin, type) and issubclass(origin, Mapping) else ""
    for part in get_args(annotation):
        yield from ((kind, mark + more) for kind, more in _sections(part))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required, or read off the data"
    value = field.get_default()
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _values(annotation: Any, metadata: Sequence[Any]) -> str:
    """What a key takes, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(parts[0], parts[1:])
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_values(part, metadata) for part in parts))
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {_values(parts[0], ())}"
        return f"list of {len(parts)}: {_values(parts[0], ())}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of text to {_values(parts[1], ())}"
    return _PLAIN[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _bounds(metadata: Sequence[Any]) -> str:
    metadata = [bound for each in metadata for bound in (each.metadata if isinstance(each, FieldInfo) else [each])]
    found = [f"{sign} {getattr(each, name):g}" for kind, name, sign in _BOUNDS for each in metadata
             if isinstance(each, kind)]  # fmt: skip
    return f" {' and '.join(found)}" if found else ""
