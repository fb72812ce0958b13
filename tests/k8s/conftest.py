import copy
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.k8s.schemas import Manifest, load_yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
Builder = Callable[[str], list[Manifest]]


@cache
def _build(folder: str) -> list[Manifest]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; it builds the overlays")
    command = ["kubectl", "kustomize", str(K8S / folder)]
    return load_yaml(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.fixture(scope="session")
def build() -> Builder:
    """Everything that `kubectl apply -k k8s/<folder>` would send; a copy that the test may change."""
    return lambda folder: copy.deepcopy(_build(folder))
