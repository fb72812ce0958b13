"""What the manifests say about the code is true: commands, flags, configuration, paths, ports, names."""

import importlib
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from pydantic import BaseModel
from ray._private import ray_constants
from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
from ray.dashboard.consts import DASHBOARD_METRIC_PORT
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.scripts.scripts import start as ray_start
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from fedppd_ray.cli.app import app
from fedppd_ray.config.file import load_config
from fedppd_ray.config.schema import Config, client_ids
from serve.deployment import ApplicationArgs, deployment
from serve.tokens import TOKEN_FILE_VARIABLE
from tests.k8s.conftest import K8S, ROOT, Builder
from tests.k8s.pods import OVERLAYS, Pod, cluster_spec, one, pods
from tests.k8s.schemas import Manifest


def pod_of(manifests: list[Manifest], name: str) -> Pod:
    (pod,) = [pod for pod in pods(manifests) if pod.name == name]
    return pod


def entrypoint(manifests: list[Manifest]) -> dict[str, Any]:
    """The RayJob's command, parsed by the real command line: an unknown flag raises."""
    words = shlex.split(one(manifests, "RayJob")["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "fedppd_ray", "train"]
    group = typer.main.get_command(app)
    train = group.commands["train"]  # type: ignore[attr-defined]
    return dict(train.make_context("train", words[4:]).params)


def trained(manifests: list[Manifest], folder: Path) -> Config:
    """The configuration that the entrypoint reads from the mounted ConfigMap."""
    path = Path(entrypoint(manifests)["config"])
    head = pod_of(manifests, "RayJob/head")
    volume = head.volumes[head.mounts[str(path.parent)]["name"]]
    data = one(manifests, "ConfigMap", volume["configMap"]["name"])["data"]
    (folder / path.name).write_text(data[path.name])
    return load_config(folder / path.name)


def serve_config(manifests: list[Manifest]) -> dict[str, Any]:
    return dict(yaml.safe_load(one(manifests, "RayService")["spec"]["serveConfigV2"]))


# ---- training


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_job_runs_a_command_of_the_package_on_a_valid_config(build: Builder, folder: str, tmp_path: Path) -> None:
    manifests = build(folder)
    assert "train" in Path(entrypoint(manifests)["config"]).name
    assert trained(manifests, tmp_path).federation.rounds >= 1


@pytest.mark.parametrize("folder", OVERLAYS)
def test_a_retried_job_finds_its_checkpoints_and_continues(build: Builder, folder: str) -> None:
    manifests = build(folder)
    spec, parameters = one(manifests, "RayJob")["spec"], entrypoint(manifests)
    assert spec["backoffLimit"] > 0
    assert parameters["resume_if_exists"] is True
    head = pod_of(manifests, "RayJob/head")
    mount = head.mounts[str(Path(parameters["out"]).parent)]
    assert not mount.get("readOnly")
    assert "persistentVolumeClaim" in head.volumes[mount["name"]]


def test_each_site_is_pinned_to_one_worker_group_that_mounts_its_data(build: Builder, tmp_path: Path) -> None:
    manifests = build("overlays/sites")
    config = trained(manifests, tmp_path)
    groups = cluster_spec(one(manifests, "RayJob"))["workerGroupSpecs"]
    homes = {}
    for client in client_ids(config.federation.clients):
        own = config.overrides_for(client)
        assert own.label_selector
        (homes[client],) = [
            group["groupName"]
            for group in groups
            if group["replicas"] > 0 and own.label_selector.items() <= group.get("labels", {}).items()
        ]
        assert own.data in pod_of(manifests, f"RayJob/{homes[client]}").mounts
    assert sorted(homes.values()) == [group["groupName"] for group in groups if "labels" in group]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_ray_start_knows_every_parameter(build: Builder, folder: str) -> None:
    options = {option.removeprefix("--") for parameter in ray_start.params for option in parameter.opts}
    for pod in pods(build(folder)):
        assert set(pod.start) <= options, pod.name


# ---- serving


def test_the_service_is_an_application_of_the_package(build: Builder) -> None:
    config = serve_config(build("overlays/cpu"))
    schema = ServeDeploySchema.model_validate(config)
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    builder = getattr(importlib.import_module(module), name)
    (parameter,) = inspect.signature(builder).parameters.values()
    assert parameter.annotation is ApplicationArgs
    args = ApplicationArgs.model_validate(application.args)
    assert not args.insecure
    assert [d.name for d in application.deployments] == [deployment(type("Any", (), {})).name]


def test_no_field_of_the_serve_config_is_misspelt(build: Builder) -> None:
    """Ray itself takes unknown fields in silence, so each section is held against its model by name."""
    config = serve_config(build("overlays/cpu"))
    (application,) = config["applications"]
    (student,) = application["deployments"]
    sections: list[tuple[dict[str, Any], type[BaseModel]]] = [
        (config, ServeDeploySchema),
        (config["http_options"], HTTPOptionsSchema),
        (config["logging_config"], LoggingConfig),
        (application, ServeApplicationSchema),
        (student, DeploymentSchema),
        (student["ray_actor_options"], RayActorOptionsSchema),
        (student["autoscaling_config"], AutoscalingConfig),
    ]
    for section, model in sections:
        assert set(section) <= set(model.model_fields), model.__name__


def test_the_serve_config_is_the_packages_own_but_for_this_clusters_settings(build: Builder) -> None:
    def comparable(config: dict[str, Any]) -> dict[str, Any]:
        (application,) = config["applications"]
        (student,) = application["deployments"]
        args = ApplicationArgs.model_validate(application["args"]).model_dump(exclude={"run"})
        scale = {k: v for k, v in student["autoscaling_config"].items() if k not in ("min_replicas", "max_replicas")}
        return {
            **config,
            "http_options": {**config["http_options"], "host": None},
            "logging_config": {**config["logging_config"], "encoding": None},
            "applications": [{**application, "args": args, "deployments": [{**student, "autoscaling_config": scale}]}],
        }

    original = yaml.safe_load((ROOT / "serve" / "config.yaml").read_text())
    assert comparable(serve_config(build("overlays/cpu"))) == comparable(original)


def test_a_stopping_worker_has_time_to_answer(build: Builder) -> None:
    manifests = build("overlays/cpu")
    (student,) = serve_config(manifests)["applications"][0]["deployments"]
    drain = student["graceful_shutdown_timeout_s"]
    assert pod_of(manifests, "RayService/replicas").spec["terminationGracePeriodSeconds"] > drain
    assert one(manifests, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] > drain


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_service_serves_the_run_that_the_job_trains(build: Builder, folder: str) -> None:
    manifests = build(folder)
    (application,) = serve_config(manifests)["applications"]
    run = Path(application["args"]["run"])
    assert run == Path(entrypoint(manifests)["out"])
    claim = "persistentVolumeClaim"
    trainer = pod_of(manifests, "RayJob/head")
    written = trainer.volumes[trainer.mounts[str(run.parent)]["name"]][claim]["claimName"]
    for pod in pods(manifests):
        if pod.owner == "RayService":
            mount = pod.mounts[str(run.parent)]
            assert pod.volumes[mount["name"]][claim]["claimName"] == written, pod.name
            assert mount["readOnly"], pod.name


def test_the_service_finds_its_token(build: Builder) -> None:
    keys = {
        manifest["metadata"]["name"]: set(manifest["stringData"])
        for manifest in yaml.safe_load_all((K8S / "secret.template.yaml").read_text())
    }
    for pod in pods(build("overlays/cpu")):
        if pod.owner == "RayService":
            path = Path(str(pod.env[TOKEN_FILE_VARIABLE]))
            secret = pod.volumes[pod.mounts[str(path.parent)]["name"]]["secret"]["secretName"]
            assert path.name in keys[secret], pod.name


def test_replicas_fit_the_workers(build: Builder) -> None:
    manifests = build("overlays/cpu")
    (student,) = serve_config(manifests)["applications"][0]["deployments"]
    (group,) = cluster_spec(one(manifests, "RayService"))["workerGroupSpecs"]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    each = student["ray_actor_options"]["num_cpus"]
    scale = student["autoscaling_config"]
    assert scale["min_replicas"] * each <= cpus * group["minReplicas"]
    assert scale["max_replicas"] * each <= cpus * group["maxReplicas"]
    assert scale["min_replicas"] < scale["max_replicas"]


# ---- ports, paths, variables, versions


def test_ports_are_rays_own(build: Builder) -> None:
    known = {
        "gcs-server": ray_constants.DEFAULT_PORT,
        "dashboard": ray_constants.DEFAULT_DASHBOARD_PORT,
        "as-metrics": AUTOSCALER_METRIC_PORT,
        "dash-metrics": DASHBOARD_METRIC_PORT,
        "client": 10001,
        "metrics": 8080,  # what the operator passes to `ray start --metrics-export-port`
        "serve": serve_config(build("overlays/cpu"))["http_options"]["port"],
    }
    for folder in OVERLAYS:
        for pod in pods(build(folder)):
            assert pod.ports.items() <= known.items(), pod.name


def test_probes_ask_paths_that_answer_without_a_token(build: Builder) -> None:
    agent = ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    for folder in OVERLAYS:
        for pod in pods(build(folder)):
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = pod.container.get(kind, {}).get("httpGet")
                if probe is None or probe["port"] == pod.ports.get("serve"):
                    assert probe is None or probe["path"] == "/-/healthz"
                    continue
                assert probe["port"] == agent, pod.name
                assert probe["path"] in PUBLIC_EXACT_PATHS, pod.name


def test_variables_are_ones_that_somebody_reads(build: Builder) -> None:
    sources = "".join(path.read_text() for name in ("fedppd_ray", "serve") for path in (ROOT / name).rglob("*.py"))
    rays = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"}
    for folder in OVERLAYS:
        for pod in pods(build(folder)):
            for name in pod.env:
                assert name in rays or f'"{name}"' in sources, f"{pod.name}: {name}"
            cache = pod.env.get("FEDPPD_CACHE")
            assert cache is None or not pod.mounts[cache].get("readOnly"), pod.name


def test_every_node_of_a_serve_cluster_has_the_same_variables(build: Builder) -> None:
    head, worker = [pod for pod in pods(build("overlays/cpu")) if pod.owner == "RayService"]
    assert head.env == worker.env


def test_one_version_of_ray_everywhere(build: Builder) -> None:
    (version,) = re.findall(r"^ARG RAY_VERSION=(\S+)$", (K8S / "Dockerfile").read_text(), re.MULTILINE)
    for folder in OVERLAYS:
        for manifest in build(folder):
            if manifest["kind"].startswith("Ray"):
                assert cluster_spec(manifest)["rayVersion"] == version
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [r for r in map(Requirement, dependencies) if r.name == "ray"]
    assert version in ray.specifier
