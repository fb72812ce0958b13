"""Break the product on purpose, one change at a time, and see whether the tests notice.

    python tests/mutants/run.py [--only PATTERN …] [--jobs N] [--check]

The mutants are in catalogue/. Each is made in a copy of the tree, and dies when a test of its selection fails or runs
out of time. The run fails when fewer than 95 % of the mutants that are not equivalent die, or when the snippet of one
is no longer found. It takes a quarter of an hour on two cores and is no part of `make test`: run it after changes to
the tests, or to what they guard.
"""

import argparse
import ast
import compileall
import contextlib
import fnmatch
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).parent / "catalogue"
PACKAGES = ("fedppd_ray", "serve")
COPIED = (*PACKAGES, "tests", "configs", "pyproject.toml")
SECONDS = 180.0  # for the tests of one mutant
SHARE = 0.95
# What takes long to import, and is not ours.
_FOREIGN = (
    *("hypothesis", "pytest", "xdist.plugin", "anyio.pytest_plugin", "numpy", "pandas", "pyarrow", "PIL.Image"),
    *("pydantic", "yaml", "typer.testing", "safetensors.numpy", "fastapi.testclient", "matplotlib.figure", "ray"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "torch._dynamo"),
)


@dataclass(frozen=True)
class Mutant:
    """`snippet` stands exactly once in the packages; its file is looked for, so that it may move.

    `tests` are the stems of the test files that must notice, the cheapest first; none: all of tests/unit. A mutant
    that computes the same as the product is `equivalent`, for the reason given: it is listed so that nobody has to
    think about it twice, and not run.
    """

    name: str
    snippet: str
    replacement: str
    tests: tuple[str, ...] = ()
    equivalent: str | None = None
    file: str = ""  # of the catalogue

    def matches(self, pattern: str) -> bool:
        return fnmatch.fnmatch(self.name, pattern) or fnmatch.fnmatch(f"{self.file}/{self.name}", pattern)


def catalogue() -> list[Mutant]:
    return [
        Mutant(**{**entry, "tests": tuple(entry.get("tests", ())), "file": path.stem})
        for path in sorted(CATALOGUE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    fate: str  # killed, timeout, SURVIVED
    seconds: float


def main() -> int:
    arguments = _arguments()
    chosen = [mutant for mutant in catalogue() if any(map(mutant.matches, arguments.only))]
    lost = [f"{mutant.name}: {problem}" for mutant in chosen if (problem := _problem(mutant, ROOT)) is not None]
    for line in lost:
        print(f"LOST      {line}")
    if arguments.check or lost:
        print(f"{len(chosen) - len(lost)} of {len(chosen)} mutants have their place")
        return 1 if lost else 0
    _preload()
    live = [mutant for mutant in chosen if mutant.equivalent is None]
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        trees = [_tree(Path(temporary) / f"tree-{job}") for job in range(arguments.jobs)]
        stems = list(dict.fromkeys(stem for mutant in live for stem in mutant.tests))
        if _fate(trees[0], stems, 10 * SECONDS) != "SURVIVED":
            print((trees[0] / "output.txt").read_text()[-3000:])
            print("the tests fail without any mutant, so they cannot tell one")
            return 1
        outcomes = list(_run_all(live, trees))
    return _summary(chosen, outcomes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=["*"], help="names, for example 'fedpa*' or 'clients/*' (a file)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--check", action="store_true", help="only see whether every mutant has its place")
    return parser.parse_args()


def _files(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def _place(mutant: Mutant, root: Path) -> list[Path]:
    """The files with the snippet, once for each time that it stands there."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in _files(root))
    return [path for path, text in texts for _ in range(text.count(mutant.snippet))]


def _problem(mutant: Mutant, root: Path) -> str | None:
    found = _place(mutant, root)
    missing = [stem for stem in mutant.tests if not list((root / "tests").rglob(f"{stem}.py"))]
    if missing:
        return f"no such test file: {', '.join(missing)}"
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        return f"its snippet must stand exactly once, and stands {len(found)} times: {where}"
    try:
        ast.parse(found[0].read_text(encoding="utf-8").replace(mutant.snippet, mutant.replacement))
    except SyntaxError as error:
        return f"is no Python, which every test would notice ({error})"
    return None


def _preload() -> None:
    """What takes long to import and is not ours, once: each mutant is tested in a fork of this process."""
    for name in _FOREIGN:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _tree(tree: Path) -> Path:
    """A copy to break."""
    tree.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    for package in PACKAGES:  # a file that is broken later is newer than what is compiled here
        compileall.compile_dir(tree / package, quiet=1)
    return tree


def _run_all(mutants: Sequence[Mutant], trees: Sequence[Path]) -> Iterator[Outcome]:
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return _run(mutant, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as threads:
        for outcome in threads.map(one, mutants):
            print(f"{outcome.fate:<9} {outcome.seconds:5.1f} s  {outcome.mutant.name}", flush=True)
            yield outcome


def _run(mutant: Mutant, tree: Path) -> Outcome:
    path = _place(mutant, tree)[0]
    sound = path.read_text(encoding="utf-8")
    began = time.monotonic()
    path.write_text(sound.replace(mutant.snippet, mutant.replacement), encoding="utf-8")
    try:
        return Outcome(mutant, _fate(tree, mutant.tests, SECONDS), time.monotonic() - began)
    finally:
        path.write_text(sound, encoding="utf-8")


def _fate(tree: Path, stems: Sequence[str], seconds: float) -> str:
    """What becomes of the tree as it is: in a process, and process group, of its own."""
    tests = [str(next((tree / "tests").rglob(f"{stem}.py"))) for stem in stems] or [str(tree / "tests/unit")]
    child = multiprocessing.get_context("fork").Process(target=_test, args=(tree, tests))
    child.start()
    child.join(seconds)
    late = child.is_alive()
    if late and child.pid:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return "timeout" if late else "SURVIVED" if child.exitcode == 0 else "killed"


def _test(tree: Path, tests: list[str]) -> None:
    """Exits with 0 if all tests pass."""
    os.setsid()
    os.chdir(tree)
    with (tree / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(place for place in sys.path[1:] if place != str(ROOT))]
    sys.dont_write_bytecode = True  # a stale one would hide the next mutant
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long", *tests])
    os._exit(int(code))  # 5 is "no test ran", which must not pass for a survivor either


def _summary(chosen: Sequence[Mutant], outcomes: Sequence[Outcome]) -> int:
    survivors = [outcome.mutant for outcome in outcomes if outcome.fate == "SURVIVED"]
    equivalent = [mutant for mutant in chosen if mutant.equivalent is not None]
    print()
    for mutant in equivalent:
        print(f"equivalent: {mutant.name}: {mutant.equivalent}")
    for mutant in survivors:
        print(f"SURVIVED: {mutant.name}")
    killed = len(outcomes) - len(survivors)
    share = killed / len(outcomes) if outcomes else 1.0
    print(f"{killed} of {len(outcomes)} mutants killed ({share:.1%}), {len(equivalent)} equivalent ones not counted")
    return 0 if share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
