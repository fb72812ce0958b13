"""The manifests are hardened, and agree with each other."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.k8s.conftest import K8S, Builder
from tests.k8s.pods import OVERLAYS, Pod, bytes_of, cluster_spec, one, pods

# ---- hardening


def every_pod(build: Builder) -> Iterator[Pod]:
    for folder in OVERLAYS:
        yield from pods(build(folder))


def containers(build: Builder) -> Iterator[tuple[str, dict[str, Any]]]:
    for pod in every_pod(build):
        yield pod.name, pod.container
    for folder in OVERLAYS:
        options = one(build(folder), "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
        yield "RayService/autoscaler", options


def test_no_container_is_root_or_can_write_its_image(build: Builder) -> None:
    for name, container in containers(build):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        mounts = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert "/tmp" in mounts, f"{name} has nowhere to write"
    for pod in every_pod(build):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.name
        assert context["runAsUser"] == 1000, pod.name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.name
        assert not any("hostPath" in volume for volume in pod.volumes.values()), pod.name


def test_every_container_has_requests_and_limits(build: Builder) -> None:
    for name, container in containers(build):
        resources = container["resources"]
        for kind in ("cpu", "memory", "ephemeral-storage"):
            assert kind in resources["requests"], name
            assert kind in resources["limits"], name


def test_every_ray_node_has_probes(build: Builder) -> None:
    for pod in every_pod(build):
        if pod.is_ray_node:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(pod.container), pod.name


def test_only_the_autoscaler_holds_a_kubernetes_token(build: Builder) -> None:
    for pod in every_pod(build):
        assert pod.spec["automountServiceAccountToken"] is False, pod.name
        tokens = [
            name
            for name, volume in pod.volumes.items()
            if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", []))
        ]
        assert not set(tokens) & {mount["name"] for mount in pod.container["volumeMounts"]}, pod.name
        assert bool(tokens) == (pod.name == "RayService/head"), pod.name
    for folder in OVERLAYS:
        options = one(build(folder), "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
        mounts = {mount["name"]: mount["mountPath"] for mount in options["volumeMounts"]}
        assert mounts["kubernetes-api"] == "/var/run/secrets/kubernetes.io/serviceaccount"


def test_the_object_store_fits_shared_memory_which_fits_the_limit(build: Builder) -> None:
    for pod in every_pod(build):
        if not pod.is_ray_node:
            continue
        shm = pod.volumes[pod.mounts["/dev/shm"]["name"]]["emptyDir"]
        assert shm["medium"] == "Memory", pod.name
        store, room = int(pod.start["object-store-memory"]), bytes_of(shm["sizeLimit"])
        assert store < room < bytes_of(pod.container["resources"]["limits"]["memory"]), pod.name


def test_every_mount_has_its_volume_and_every_volume_is_used(build: Builder) -> None:
    for pod in every_pod(build):
        used = {mount["name"] for mount in pod.container["volumeMounts"]}
        if pod.name == "RayService/head":
            used.add("kubernetes-api")
        assert used == set(pod.volumes), pod.name


def test_ray_tokens_are_on_everywhere(build: Builder) -> None:
    for folder in OVERLAYS:
        for manifest in build(folder):
            if manifest["kind"].startswith("Ray"):
                auth = cluster_spec(manifest)["authOptions"]
                assert auth == {"mode": "token", "secretName": "fedppd-ray-token"}
    for pod in every_pod(build):
        assert pod.env["RAY_AUTH_MODE"] == "token", pod.name


def test_the_namespace_enforces_the_restricted_standard(build: Builder) -> None:
    for folder in OVERLAYS:
        namespace = one(build(folder), "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_images_carry_a_version(build: Builder) -> None:
    for pod in every_pod(build):
        _, _, tag = pod.container["image"].rpartition(":")
        assert tag[0].isdigit(), f"{pod.name}: {pod.container['image']}"


# ---- consistency


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_job_trains_on_the_cluster_of_the_overlay(build: Builder, folder: str) -> None:
    manifests = build(folder)
    assert cluster_spec(one(manifests, "RayJob")) == one(manifests, "RayCluster")["spec"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_claims_config_maps_and_secrets_exist(build: Builder, folder: str) -> None:
    manifests = build(folder)
    secrets = {
        manifest["metadata"]["name"]: set(manifest["stringData"])
        for manifest in yaml.safe_load_all((K8S / "secret.template.yaml").read_text())
    }
    names = {kind: {m["metadata"]["name"] for m in manifests if m["kind"] == kind} for kind in
             ("PersistentVolumeClaim", "ConfigMap")}  # fmt: skip
    for pod in pods(manifests):
        for volume in pod.volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in names["PersistentVolumeClaim"]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names["ConfigMap"]
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
        for entry in pod.container.get("env", []):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            assert reference is None or reference["key"] in secrets[reference["name"]]
    assert "auth_token" in secrets["fedppd-ray-token"], "the key that KubeRay reads"


@pytest.mark.parametrize("folder", OVERLAYS)
def test_every_object_belongs_to_one_stage_of_the_readme(build: Builder, folder: str) -> None:
    """README.md applies an overlay by stages, with `-l app.kubernetes.io/component=…`."""
    stages = {"RayCluster": "cluster", "RayJob": "train", "RayService": "serve"}
    for manifest in build(folder):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "fedppd"
        assert labels["app.kubernetes.io/component"] == stages.get(manifest["kind"], "shared")


def test_the_gpu_overlay_asks_for_gpus_and_tolerates_their_taint(build: Builder) -> None:
    (gpu,) = [pod for pod in pods(build("overlays/gpu")) if pod.name == "RayJob/gpu"]
    assert gpu.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in gpu.spec["tolerations"]


# ---- network


def policies(build: Builder) -> dict[str, dict[str, Any]]:
    manifests = build("overlays/cpu")
    return {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}


def test_what_is_not_allowed_is_denied_and_dns_is_allowed(build: Builder) -> None:
    found = policies(build)
    assert found["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    dns = found["allow-dns"]
    assert dns["podSelector"] == {}
    assert {(port["protocol"], port["port"]) for port in dns["egress"][0]["ports"]} == {("UDP", 53), ("TCP", 53)}


def test_each_role_has_a_policy_and_no_role_reaches_another(build: Builder) -> None:
    found = policies(build)
    roles = {pod.labels["fedppd.io/role"] for pod in every_pod(build)}
    assert roles == {"training", "serving", "submitter"}
    reach = {
        role: {
            peer.get("podSelector", {}).get("matchLabels", {}).get("fedppd.io/role")
            for rule in found[role].get("egress", [])
            for peer in rule["to"]
        }
        for role in roles
    }
    assert reach == {"training": {"training"}, "serving": {"serving"}, "submitter": {"training"}}
    for role in roles:
        assert found[role]["podSelector"] == {"matchLabels": {"fedppd.io/role": role}}


def test_open_ports_are_ports_of_the_pods(build: Builder) -> None:
    for role in ("training", "serving"):
        listening = {
            port for pod in every_pod(build) if pod.labels["fedppd.io/role"] == role for port in pod.ports.values()
        }
        opened = {port["port"] for rule in policies(build)[role]["ingress"] for port in rule.get("ports", [])}
        assert opened <= listening  # fmt: skip


def test_only_the_services_head_reaches_beyond_the_cluster(build: Builder) -> None:
    outside = {
        name: spec["podSelector"]
        for name, spec in policies(build).items()
        for rule in spec.get("egress", [])
        for peer in rule["to"]
        if "ipBlock" in peer
    }
    head = {"matchLabels": {"fedppd.io/role": "serving", "ray.io/node-type": "head"}}
    assert outside == {"serving-autoscaler": head}


# ---- sites


def test_a_site_runs_where_its_data_are(build: Builder) -> None:
    manifests = build("overlays/sites")
    volumes = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PersistentVolume"}
    claims = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    groups = {group["groupName"]: group for group in cluster_spec(one(manifests, "RayJob"))["workerGroupSpecs"]}
    sites = {name: group for name, group in groups.items() if "labels" in group}
    assert len(sites) == len(volumes) == 3
    for pod in pods(manifests):
        if pod.group not in sites or pod.owner != "RayJob":
            continue
        site = sites[pod.group]["labels"]["fl-site"]
        assert pod.spec["nodeSelector"] == {"fl-site": site}
        data = pod.mounts["/data"]
        claim = pod.volumes[data["name"]]["persistentVolumeClaim"]
        assert data["readOnly"] is claim["readOnly"] is True
        volume = volumes[claims[claim["claimName"]]["volumeName"]]
        assert volume["claimRef"] == {"namespace": "fedppd", "name": claim["claimName"]}
        (term,) = volume["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "fl-site", "operator": "In", "values": [site]}]


# ---- monitoring


def test_pod_monitors_name_labels_and_ports_that_pods_have(build: Builder) -> None:
    ray_pods = [pod for pod in every_pod(build) if pod.is_ray_node]
    for monitor in build("monitoring"):
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        selected = [pod for pod in ray_pods if selector <= pod.runtime_labels().items()]
        assert selected
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in pod.ports for pod in selected)


def test_every_ray_pod_is_scraped(build: Builder) -> None:
    selectors = [m["spec"]["selector"]["matchLabels"].items() for m in build("monitoring")]
    for pod in every_pod(build):
        if pod.is_ray_node:
            assert any(selector <= pod.runtime_labels().items() for selector in selectors), pod.name
