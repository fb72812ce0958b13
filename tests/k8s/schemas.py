"""Strict validators for every kind in k8s/: a field that the schema does not know is an error.

KubeRay's kinds are checked against the operator's own CRDs, core kinds against Kubernetes' schemas, and the
Prometheus Operator's PodMonitor, whose CRD is not at hand, against a minimal schema of its own.
"""

import copy
import gzip
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Manifest = dict[str, Any]

CRDS = Path(__file__).parents[2] / ".." / "shared" / "kuberay-crds"
PLURALS = {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayService": "rayservices"}
# The oldest Kubernetes that README.md promises, and the newest that the schemas know.
KUBERNETES = ("1.30", kubernetes_validate.latest_version())

_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_METADATA = {
    "type": "object",
    "properties": {"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS, "annotations": _TEXTS},
    "required": ["name", "namespace"],
    "additionalProperties": False,
}
_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": _METADATA,
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "podTargetLabels": {"type": "array", "items": _TEXT},
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                    "properties": {"matchLabels": _TEXTS},
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "port": _TEXT,
                            "path": _TEXT,
                            "interval": _DURATION,
                            "scrapeTimeout": _DURATION,
                        },
                    },
                },
            },
        },
    },
}


def load_yaml(text: str | bytes) -> list[Manifest]:
    """All documents, by libyaml where PyYAML has it: the CRDs are megabytes, and plain Python takes half a minute."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def validate(manifest: Manifest) -> None:
    """Raises jsonschema.ValidationError for anything that the schema of its kind does not allow."""
    kind = manifest["kind"]
    if kind in PLURALS:
        _ray_validator(kind).validate(manifest)
    elif kind == "PodMonitor":
        jsonschema.validate(manifest, POD_MONITOR)
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


@cache
def _ray_validator(kind: str) -> jsonschema.Draft202012Validator:
    path = CRDS / f"ray.io_{PLURALS[kind]}.yaml.gz"
    if not path.exists():
        pytest.skip(f"KubeRay's CRDs are not beside the repository ({path.name} is missing)")
    (definition,) = load_yaml(gzip.decompress(path.read_bytes()))
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = strict(schema)
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["apiVersion"] = {"const": "ray.io/v1"}
    schema["properties"]["kind"] = {"const": kind}
    # The API server checks an object's own metadata itself; a CRD says nothing about them.
    schema["properties"]["metadata"] = _METADATA
    return jsonschema.Draft202012Validator(schema)


def strict(schema: Any) -> Any:
    """A CRD's schema as JSON schema that refuses what the API server would drop in silence."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict_under(key, value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if (
        schema.get("type") == "object"
        and "additionalProperties" not in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        result["additionalProperties"] = False
    if result.pop("nullable", False):
        return {"anyOf": [result, {"type": "null"}]}
    return result


def strict_under(key: str, value: Any) -> Any:
    """`properties` holds schemas under names that are no keywords: a field may well be called `type`."""
    if key == "properties":
        return {name: strict(schema) for name, schema in value.items()}
    return value if key in ("enum", "default", "required") else strict(value)


def misspelt(manifest: Manifest, path: tuple[str | int, ...]) -> Manifest:
    """A copy whose field at `path` has one letter more."""
    result = copy.deepcopy(manifest)
    *parents, name = path
    node: Any = result
    for parent in parents:
        node = node[parent]
    node[f"{name}x"] = node.pop(name)
    return result
