"""What the packages may know of each other, and what no module may do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tuner"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Data flows from left to right, and imports point left. The modules beside the packages tie these together.
ORDER = ["problem", "generate", "build", "device", "measure", "learn", "store", "export", "report"]
ORDER += ["sweep", "recheck", "doctor", "cli", "__main__"]
SEEN_BY_ALL = {"errors", "identity"}

KINDS = {"cpu", "hip", "cuda"}
KNOWS_KINDS = {"device", "build"}  # and generate/template.py, which declares what a template may be for


def part_of(path: Path) -> str:
    """`generate` for tuner/generate/space.py, `sweep` for tuner/sweep.py, `` for tuner/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Names like `tuner.problem.gemm` and `numpy`, of every import wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package in full"
            assert node.module is not None
            if node.module == "tuner":
                yield from (f"tuner.{alias.name}" for alias in node.names)
            else:
                yield node.module


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_package_has_its_place() -> None:
    parts = {part_of(path) for path in MODULES}
    assert parts == {*ORDER, *SEEN_BY_ALL, "testing", ""}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_left(path: Path) -> None:
    here = part_of(path)
    names = [name.split(".")[1] for name in imported_modules(parse(path)) if name.startswith("tuner.")]
    seen = {name for name in names if name != "__version__"}
    if here == "":
        assert seen <= {"export"}
    elif here in SEEN_BY_ALL:
        assert not seen
    elif here == "testing":
        assert seen <= {*ORDER, *SEEN_BY_ALL, "testing"}
    else:
        assert seen <= {*ORDER[: ORDER.index(here) + 1], *SEEN_BY_ALL}


def test_importing_the_package_imports_no_part_of_it() -> None:
    body = [node for node in parse(PACKAGE / "__init__.py").body if not isinstance(node, ast.If)]
    at_once = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for node in at_once for name in imported_modules(node) if name.startswith("tuner")]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_runs_what_a_stranger_supplies(path: Path) -> None:
    tree = parse(path)
    roots = {name.split(".")[0] for name in imported_modules(tree)}
    assert not roots & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "os.system", "os.popen", "__import__"}, node.lineno
            for keyword in node.keywords:
                asks = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (asks and keyword.arg in {"shell", "allow_pickle"}), node.lineno


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_devices_know_what_runs_where(path: Path) -> None:
    if part_of(path) in KNOWS_KINDS or name_of(path) == "generate/template.py":
        return
    for node in ast.walk(parse(path)):
        patterns: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            patterns = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            patterns = [node.value]
        for pattern in patterns:
            words = {leaf.value for leaf in ast.walk(pattern) if isinstance(leaf, ast.Constant)}
            assert not words & KINDS, f"line {node.lineno}"
