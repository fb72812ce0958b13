"""A site in a cluster of its own: manifests that Kubernetes takes, and a pod that nobody can reach."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.schemas import validate

FOLDER = Path(__file__).parents[2] / "k8s" / "site"
MANIFESTS = [
    manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_every_manifest_is_valid_and_is_applied(manifest: dict[str, Any]) -> None:
    validate(manifest)
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")


def test_nobody_reaches_the_pod_and_it_has_no_port() -> None:
    kinds = {manifest["kind"]: manifest for manifest in MANIFESTS}
    assert "Service" not in kinds
    policy = kinds["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == {}
    assert "Ingress" in policy["policyTypes"]
    assert "ingress" not in policy
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert "ports" not in pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    data = next(mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "data")
    assert data["readOnly"]


def test_the_unit_for_systemd_runs_what_the_deployment_runs() -> None:
    unit = (FOLDER / "fedppd-site.service").read_text()
    command = next(manifest for manifest in MANIFESTS if manifest["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ][0]["command"]
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart=")).split()
    assert [word for word in line[1:] if not word.startswith("/")] == [
        word for word in command[1:] if not word.startswith("/")
    ]
    assert "SocketBindDeny=any" in unit
