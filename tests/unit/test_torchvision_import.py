"""torchvision imports beside any build of torch, and errors of another kind are not swallowed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedppd_ray.models import torchvision_import

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from fedppd_ray.models.torchvision_import import _declared, import_torchvision
module = import_torchvision()
print(module.__file__, module.datasets.CIFAR10.__name__, len(_declared), import_torchvision() is module)
import torchmetrics.functional.classification
"""


def test_a_fresh_process_imports_it_whatever_the_build_of_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    _, name, declared, again = done.stdout.split()
    assert name == "CIFAR10"
    assert declared in ("0", "1")
    assert again == "True"


def fake_torchvision(folder: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torchvision.py").write_text(content)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torchvision_import, "_declared", [])


def test_nothing_is_declared_where_the_plain_import_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchvision(tmp_path, "answer = 42", monkeypatch)
    assert torchvision_import.import_torchvision().answer == 42
    assert torchvision_import._declared == []
    del sys.modules["torchvision"]


@pytest.mark.parametrize(
    ("content", "kind"), [("raise RuntimeError('no driver')", RuntimeError), ("import absent_module", ImportError)]
)
def test_an_error_of_another_kind_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, kind: type[Exception]
) -> None:
    fake_torchvision(tmp_path, content, monkeypatch)
    with pytest.raises(kind):
        torchvision_import.import_torchvision()
    assert torchvision_import._declared == []
