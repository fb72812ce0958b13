"""Finds the pods that the manifests describe, wherever a kind keeps them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.k8s.schemas import Manifest

OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/sites")
FOLDERS = (*OVERLAYS, "monitoring", "object-store")


@dataclass(frozen=True)
class Pod:
    owner: str  # kind of the manifest
    group: str  # head, submitter, autoscaler or the worker group's name
    labels: dict[str, str]
    spec: dict[str, Any]
    start: dict[str, str]  # rayStartParams

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.group}"

    @property
    def is_ray_node(self) -> bool:
        return self.group != "submitter"

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def mounts(self) -> dict[str, dict[str, Any]]:
        """Mount path → mount."""
        return {mount["mountPath"]: mount for mount in self.container["volumeMounts"]}

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        return {volume["name"]: volume for volume in self.spec["volumes"]}

    @property
    def env(self) -> dict[str, str | None]:
        return {entry["name"]: entry.get("value") for entry in self.container.get("env", [])}

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def runtime_labels(self) -> dict[str, str]:
        """With those that the operator adds."""
        node = "head" if self.group == "head" else "worker"
        added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node} if self.is_ray_node else {}
        return {**self.labels, **added}


def one(manifests: Sequence[Manifest], kind: str, name: str | None = None) -> Manifest:
    (found,) = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    return found


def cluster_spec(manifest: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return dict({"RayJob": spec.get("rayClusterSpec"), "RayService": spec.get("rayClusterConfig")}.get(
        manifest["kind"], spec
    ) or {})  # fmt: skip


def pods(manifests: Sequence[Manifest]) -> Iterator[Pod]:
    for manifest in manifests:
        kind = manifest["kind"]
        if not kind.startswith("Ray"):
            continue
        spec = cluster_spec(manifest)
        head = spec["headGroupSpec"]
        yield _pod(kind, "head", head["template"], head["rayStartParams"])
        for group in spec["workerGroupSpecs"]:
            yield _pod(kind, group["groupName"], group["template"], group["rayStartParams"])
        if kind == "RayJob":
            yield _pod(kind, "submitter", manifest["spec"]["submitterPodTemplate"], {})


def _pod(owner: str, group: str, template: dict[str, Any], start: dict[str, str]) -> Pod:
    return Pod(owner, group, template["metadata"]["labels"], template["spec"], start)


_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def bytes_of(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * _BINARY[unit]
