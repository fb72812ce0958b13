"""Every manifest is one that the API server and KubeRay 1.7 know, field by field."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.conftest import K8S, Builder
from tests.k8s.pods import FOLDERS, OVERLAYS, one, pods
from tests.k8s.schemas import KUBERNETES, Manifest, misspelt, strict, validate

Path = tuple[str | int, ...]


# ---- schemas


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_manifest_is_valid_and_has_no_unknown_field(build: Builder, folder: str) -> None:
    manifests = build(folder)
    assert manifests
    for manifest in manifests:
        validate(manifest)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_every_pod_is_a_valid_pod_of_kubernetes(build: Builder, folder: str) -> None:
    for pod in pods(build(folder)):
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": pod.labels}, "spec": pod.spec}
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_secret_template_is_valid_and_holds_no_secret() -> None:
    for manifest in yaml.safe_load_all((K8S / "secret.template.yaml").read_text()):
        validate(manifest)
        assert set(manifest["stringData"].values()) == {"REPLACE-ME"}


# Maps whose keys are the user's own; anything is a valid key there.
FREE = {
    "labels", "matchLabels", "annotations", "data", "stringData", "rayStartParams", "nodeSelector", "requests",
    "limits", "capacity", "podTargetLabels",
}  # fmt: skip


def fields(node: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            if key not in FREE:
                yield from fields(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from fields(value, (*path, index))


def distinct(manifest: Manifest) -> list[Path]:
    """One path for each field, whichever element of a list it was met in first."""
    found: dict[Path, Path] = {}
    for path in fields(manifest):
        found.setdefault(tuple("*" if isinstance(part, int) else part for part in path), path)
    return [path for path in found.values() if path not in (("kind",), ("apiVersion",))]


def rejected(manifest: Manifest) -> bool:
    try:
        validate(manifest)
    except jsonschema.ValidationError:
        return True
    return False


@pytest.mark.parametrize("folder", ["overlays/sites", "monitoring"])
def test_any_misspelt_field_is_rejected(build: Builder, folder: str) -> None:
    """Each field of each kind, pod templates included, gets a letter too much; each time validation must fail."""
    kinds: dict[str, Manifest] = {}
    for manifest in build(folder):
        kinds.setdefault(manifest["kind"], manifest)
    accepted = [
        f"{kind}: {'.'.join(map(str, path))}"
        for kind, manifest in kinds.items()
        for path in distinct(manifest)
        if not rejected(misspelt(manifest, path))
    ]
    assert accepted == []


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayCluster", "spec.workerGroupSpecs.0.replicas"),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.securityContext.readOnlyRootFilesystem"),
        ("RayJob", "spec.backoffLimit"),
        ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volumes.0.emptyDir.sizeLimit"),
        ("RayJob", "spec.submitterPodTemplate.spec.containers.0.env.1.valueFrom.secretKeyRef.key"),
        ("RayService", "spec.serveConfigV2"),
        ("RayService", "spec.rayClusterConfig.autoscalerOptions.idleTimeoutSeconds"),
        ("RayService", "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.readinessProbe.httpGet.port"),
        ("NetworkPolicy", "spec.podSelector"),
        ("PersistentVolumeClaim", "spec.resources.requests"),
        ("ConfigMap", "data"),
        ("Namespace", "metadata.labels"),
    ],
)  # fmt: skip
def test_this_misspelt_field_is_rejected(build: Builder, kind: str, path: str) -> None:
    """The same by name, in case the walk above ever walks past something."""
    manifest = next(m for m in build("overlays/cpu") if m["kind"] == kind)
    parts: Path = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    assert rejected(misspelt(manifest, parts))


def test_a_wrong_type_is_rejected(build: Builder) -> None:
    manifest = one(build("overlays/cpu"), "RayCluster")
    manifest["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    assert rejected(manifest)


def test_strict_keeps_open_what_the_crd_leaves_open() -> None:
    schema = {
        "type": "object",
        "properties": {
            "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "port": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
            "type": {"type": "object", "properties": {"type": {"type": "string"}}},
            "maybe": {"type": "string", "nullable": True},
        },
    }
    good = {"open": {"any": 1}, "map": {"key": "x"}, "port": "http", "type": {"type": "x"}, "maybe": None}
    validator = jsonschema.Draft202012Validator(strict(schema))
    assert validator.is_valid(good)
    assert validator.is_valid({**good, "port": 80})
    for bad in ({"map": {"key": 1}}, {"port": 1.5}, {"type": {"typo": "x"}}, {"other": 1}):
        assert not validator.is_valid({**good, **bad})
