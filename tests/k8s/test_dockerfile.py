"""A small lint of k8s/Dockerfile, for want of a Docker engine where the tests run."""

import re
import tomllib
from fnmatch import fnmatch

from packaging.requirements import Requirement

from tests.k8s.conftest import K8S, ROOT

TEXT = (K8S / "Dockerfile").read_text()
_CODE = "\n".join(line for line in TEXT.splitlines() if line and not line.startswith("#"))
INSTRUCTIONS = re.sub(r"\\\n\s*", "", _CODE).splitlines()


def instructions(keyword: str) -> list[str]:
    return [line.removeprefix(f"{keyword} ") for line in INSTRUCTIONS if line.startswith(f"{keyword} ")]


def copied() -> list[str]:
    """Sources in the build context, which is the root of the repository."""
    return [source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]]


def test_the_base_image_has_a_version() -> None:
    for line in instructions("FROM"):
        image = line.split()[0]
        _, _, tag = image.partition(":")
        assert tag, f"{image} has no tag"
        assert tag != "latest"


def test_the_python_is_one_that_the_package_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = {line.split()[0].partition(":")[2].partition("-")[0] for line in instructions("FROM")}
    assert version in Requirement(f"python{project['requires-python']}").specifier


def test_the_last_user_is_not_root_and_given_by_number() -> None:
    user = instructions("USER")[-1].split(":")[0]
    assert user.isdigit()
    assert int(user) != 0
    assert f"--uid {user} " in TEXT
    # No instruction after it could need to be root.
    assert [line.split()[0] for line in INSTRUCTIONS][-2:] == ["USER", "CMD"]


def test_everything_copied_exists() -> None:
    for source in copied():
        assert (ROOT / source).exists(), f"COPY {source}: not in the repository"


def test_the_build_context_lets_through_exactly_what_is_copied() -> None:
    lines = (K8S / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())


def test_torch_is_what_pyproject_asks_for() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [requirement for requirement in map(Requirement, dependencies) if requirement.name == "torch"]
    (pinned,) = re.findall(r"'(torch[<>=][^']*)'", TEXT)
    assert Requirement(pinned).specifier == torch.specifier


def test_the_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = re.findall(r"^ARG EXTRAS=(\S+)$", TEXT, re.MULTILINE)
    assert set(chosen.split(",")) <= set(extras)


def test_the_wheel_carries_every_file_of_the_packages() -> None:
    """The image installs a wheel, not the checkout: a file that is not Python must be named as package data."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    data: dict[str, list[str]] = setuptools.get("package-data", {})
    for package in ("fedppd_ray", "serve"):
        patterns = [*data.get(package, []), *data.get("*", [])]
        for path in (ROOT / package).rglob("*"):
            name = path.relative_to(ROOT / package).as_posix()
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in name:
                assert any(fnmatch(name, pattern) for pattern in patterns), f"{package}/{name} is not in the wheel"
