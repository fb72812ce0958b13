"""What k8s/README.md tells people to type exists."""

import re

import yaml

from tests.k8s.conftest import K8S, ROOT, Builder
from tests.k8s.pods import OVERLAYS, one

TEXT = (K8S / "README.md").read_text()


def test_paths_exist() -> None:
    for path in re.findall(r"(?<![\w/])((?:k8s|configs|base|overlays)/[\w./-]*\w)", TEXT):
        assert (ROOT / path).exists() or (K8S / path).exists(), path
    assert (K8S / "../SECURITY.md").exists()


def test_stages_are_labels_of_the_manifests(build: Builder) -> None:
    stages = {manifest["metadata"]["labels"]["app.kubernetes.io/component"] for manifest in build(OVERLAYS[0])}
    assert set(re.findall(r"-l app\.kubernetes\.io/component=(\w+)", TEXT)) == stages


def test_secrets_are_those_of_the_template() -> None:
    made = dict(re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", TEXT))
    assert made.pop("fedppd-object-store") == "AWS_ACCESS_KEY_ID"
    template = yaml.safe_load_all((K8S / "secret.template.yaml").read_text())
    assert made == {manifest["metadata"]["name"]: next(iter(manifest["stringData"])) for manifest in template}


def test_objects_have_the_names_that_the_operator_gives(build: Builder) -> None:
    manifests = build("overlays/cpu")
    for kind, form in (
        ("RayJob", "job/{}"),
        ("RayJob", "rayjob/{}"),
        ("RayService", "service/{}-serve-svc"),
        ("RayCluster", "service/{}-head-svc"),
    ):
        assert form.format(one(manifests, kind)["metadata"]["name"]) in TEXT


def test_images_are_those_of_the_overlays(build: Builder) -> None:
    for folder in ("overlays/cpu", "overlays/gpu"):
        kustomization = yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())
        (image,) = kustomization["images"]
        assert image["newTag"] in TEXT
        assert image["newName"].partition("/")[0] in TEXT
    (ray,) = {m["spec"]["rayVersion"] for m in build("overlays/cpu") if m["kind"] == "RayCluster"}
    assert ray in (K8S / "Dockerfile").read_text()
