"""The layers, read off the syntax tree: who may import whom, and where randomness and time may come from."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fedppd_ray"
FILES = sorted(PACKAGE.rglob("*.py"))
RUNTIME = [path for path in FILES if path.is_relative_to(PACKAGE / "runtime")]
COMMAND = [*(PACKAGE / "cli").glob("*.py"), PACKAGE / "__main__.py", PACKAGE / "api.py", PACKAGE / "__init__.py"]
WITHOUT_RAY = [path for path in FILES if path not in RUNTIME]
PURE = [path for path in WITHOUT_RAY if path not in COMMAND]
ALGORITHM = [
    path
    for path in PURE
    if path.relative_to(PACKAGE).parts[0]
    in ("bayes", "inference", "federation", "methods", "workers", "data", "models", "evaluation")
]
SERVE = sorted((ROOT / "serve").rglob("*.py"))

# Functions of torch, and methods of tensors, that draw from the global generator unless told otherwise.
FUNCTIONS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "multinomial"}
METHODS = {
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_"),
}
GLOBAL_DROPOUT = {"dropout", "dropout2d", "alpha_dropout", "Dropout2d", "AlphaDropout"}
NUMPY_WITHOUT_STATE = {"Generator", "PCG64"}


# A room imports only those before it. What lies beside the rooms: seeding, errors and registry before them all, api and
# the command after.
ROOMS = (
    *("errors", "registry", "seeding", "config", "models", "data", "bayes", "inference", "federation", "methods"),
    *("workers", "evaluation", "runs", "releases", "studies", "reports", "sites", "runtime", "api", "cli", "__main__"),
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(source: str, package: str) -> Iterator[str]:
    """Every imported module and imported name, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parts[:-1])))


def importing(path: Path, *forbidden: str) -> list[str]:
    return [name for name in imports_of(path) if any(name == f or name.startswith(f + ".") for f in forbidden)]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def global_draws(source: str) -> list[str]:
    """Uses of global random state: seeding it, or drawing without a generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.startswith(("np.random.", "numpy.random.")) and name.split(".")[2] not in NUMPY_WITHOUT_STATE:
                found.append(name)
            if name in ("torch.manual_seed", "torch.seed", "torch.random.manual_seed", "torch.set_rng_state"):
                found.append(name)
            if name.split(".")[0] in ("F", "nn", "functional") and node.attr in {*GLOBAL_DROPOUT, "Dropout"}:
                found.append(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, method = dotted(node.func), node.func.attr
            draws = method in METHODS or (method in FUNCTIONS and name.startswith("torch."))
            if draws and "generator" not in {keyword.arg for keyword in node.keywords}:
                found.append(name)
    return found


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_a_pure_module_imports_no_ray_no_http_and_no_runtime(path: Path) -> None:
    """Sites alone speak HTTP: the coordinator's door is there."""
    http = () if path.is_relative_to(PACKAGE / "sites") else ("fastapi", "starlette", "uvicorn")
    assert importing(path, "ray", *http, "serve", "fedppd_ray.runtime") == []


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_place_in_the_order() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert found <= set(ROOMS)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != PACKAGE], ids=relative)
def test_a_room_knows_only_the_rooms_before_it(path: Path) -> None:
    """No cycles between rooms. `fedppd_ray` itself offers the version, and other names only when they are asked for."""
    own = ROOMS.index(path.relative_to(PACKAGE).parts[0])
    known = {name for name in imports_of(path) if name.startswith("fedppd_ray.") and room_of(name) in ROOMS}
    assert [name for name in sorted(known) if ROOMS.index(room_of(name)) > own] == []


def literals(path: Path) -> set[str]:
    """The texts in a module's code, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


@pytest.mark.parametrize("path", [p for p in FILES if "methods" not in p.relative_to(PACKAGE).parts], ids=relative)
def test_nothing_outside_the_room_of_methods_names_a_method(path: Path) -> None:
    """`fedppd` is the product's name too, and the method of a file that names none."""
    named = re.compile(r"\b(fedavg|fedbe|fedswag|fedpa|fedppd_distill)\b")
    homes = {"methods.fedavg"} if path == PACKAGE / "__init__.py" else set()  # of names that the package offers
    assert [text for text in literals(path) - homes if named.search(text)] == []
    assert not re.search(r"\.method (==|!=|in) ", path.read_text(encoding="utf-8"))


RUN_FILES = ("config.yaml", "metrics.jsonl", "clients.json", "state.safetensors", "manifest.json", "model.json")


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "layout.py"], ids=relative)
def test_only_the_layout_knows_the_names_of_a_runs_files(path: Path) -> None:
    names = (*RUN_FILES, "student.safetensors", "figures.json", "results.json")
    assert [text for text in literals(path) if any(name in text for name in names)] == []


@pytest.mark.parametrize("path", [*FILES, *SERVE], ids=relative)
def test_only_data_and_the_services_inputs_speak_of_pixels(path: Path) -> None:
    # Of the service: what decodes a request, and the limit that users set on it.
    decoding = (
        "inputs",
        "answers",
        "decoders",
        "decoder_process",
        "npy",
        "structure",
        "tensors",
        "settings",
        "schemas",
    )
    if path.is_relative_to(PACKAGE / "data") or path in [ROOT / "serve" / f"{name}.py" for name in decoding]:
        pytest.skip("this is where pixels are")
    assert "pixel" not in path.read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("path", WITHOUT_RAY, ids=relative)
def test_only_the_runtime_imports_ray(path: Path) -> None:
    assert importing(path, "ray") == []


def test_the_runtime_does_import_ray() -> None:
    assert any(importing(path, "ray") for path in RUNTIME)


@pytest.mark.parametrize("path", RUNTIME, ids=relative)
def test_the_runtime_imports_no_service(path: Path) -> None:
    assert importing(path, "serve", "fastapi", "starlette") == []


@pytest.mark.parametrize("path", SERVE, ids=relative)
def test_the_service_never_imports_the_runtime(path: Path) -> None:
    assert importing(path, "fedppd_ray.runtime") == []


def test_the_app_of_the_service_does_not_need_ray() -> None:
    """Neither app.py nor any module of the service that it imports, however indirectly."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SERVE}
    reached: set[str] = set()
    waiting = ["serve.app"]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in reached:
            reached.add(name)
            waiting.extend(imports_of(modules[name]))
    assert {name: importing(modules[name], "ray") for name in reached} == {name: [] for name in reached}


@pytest.mark.parametrize("path", ALGORITHM, ids=relative)
def test_the_algorithm_reads_no_clock_and_no_entropy(path: Path) -> None:
    assert importing(path, "time", "datetime", "random", "secrets", "uuid", "os.urandom") == []


@pytest.mark.parametrize("path", ALGORITHM, ids=relative)
def test_the_algorithm_uses_no_global_random_state(path: Path) -> None:
    assert global_draws(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", ["resources"])
def test_sizing_is_pure_although_it_lies_in_the_runtime(name: str) -> None:
    assert importing(PACKAGE / "runtime" / f"{name}.py", "ray", "torch") == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    import ray.util", "ray.util"),
        ("from fedppd_ray import runtime", "fedppd_ray.runtime"),
        ("from ..runtime import driver", "fedppd_ray.runtime.driver"),
        ("from . import runtime", "fedppd_ray.core.runtime"),
        ("if True:\n    from ray import serve as ray_serve", "ray.serve"),
    ],
)
def test_the_check_sees_every_form_of_import(source: str, name: str) -> None:
    assert name in set(imports(source, "fedppd_ray.core"))


@pytest.mark.parametrize(
    "source",
    [
        "np.random.seed(1)",
        "numpy.random.rand(3)",
        "np.random.default_rng()",
        "torch.manual_seed(0)",
        "torch.randn(3)",
        "x.normal_()",
        "nn.init.xavier_uniform_(w)",
        "F.dropout(x)",
        "nn.Dropout(0.5)",
    ],
)
def test_the_check_sees_every_form_of_global_randomness(source: str) -> None:
    assert global_draws(source)


def test_the_check_allows_generators() -> None:
    allowed = "torch.randn(3, generator=g)\ng.manual_seed(1)\nnp.random.Generator(np.random.PCG64(1)).normal(0, 1, 3)"
    assert global_draws(allowed) == []
