"""Imports between modules: no cycles, each layer imports only those below it, and only comm.mpi imports mpi4py.

All imports count: those inside functions and those for types only (`if TYPE_CHECKING`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import mpisparse

ROOT = "mpisparse"
PACKAGE = Path(mpisparse.__file__).parent
COMPILED = {"mpisparse._cpu"}  # an extension module, which imports nothing of the package
Edge = tuple[str, str]  # the importing module and the imported one

# From the bottom to the top. A name covers all modules below it that have no layer of their own.
LAYERS = (
    ("_cpu", "arrays", "errors", "measures", "names", "owner", "randomness", "stopping", "version"),
    ("backends", "comm"),
    ("wire", "select"),
    ("core",),
    ("schemes",),
    ("model", "sync", "attachment", "scaling", "vectors", "optim", "sharding", "plan"),
    ("checkpoint", "integrations"),
    ("",),  # mpisparse/__init__.py, which offers the names of all these
    ("runtime", "examples"),
    ("bench",),
    ("runtime.cli", "__main__"),  # the command line starts trainings and benchmarks
)


def modules() -> dict[str, Path]:
    """Return the source of every module by name; a package's own module is its __init__.py."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [ROOT, *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a source imports, including those outside the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not followed here"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


def edges() -> set[Edge]:
    """Return all imports between modules of the package."""
    found = modules()
    known = {*found, *COMPILED}
    result = {
        (name, target)
        for name, path in found.items()
        for target in set(imported(ast.parse(path.read_text()), known)) & known
    }
    return {(source, target) for source, target in result if source != target}


def with_packages(graph: Iterable[Edge]) -> Iterator[Edge]:
    """Add what Python runs implicitly: the __init__.py of packages that hold the imported module but not the importer."""
    for source, target in graph:
        yield source, target
        for cut in range(1, target.count(".")):
            parent = target.rsplit(".", cut)[0]
            if not f"{source}.".startswith(f"{parent}."):
                yield source, parent


def layer(module: str) -> int:
    """Return the number of a module's layer, by the longest name that covers it."""
    relative = module.removeprefix(ROOT).removeprefix(".")
    covering = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if relative == name or (name and relative.startswith(f"{name}."))
    ]
    assert covering, f"{module} has no layer; enter it in LAYERS"
    return max(covering)[1]


def package(module: str) -> str:
    """Return the part of the package that a module belongs to, such as "select"; the command line is its own part."""
    relative = module.removeprefix(ROOT).removeprefix(".")
    return relative if relative in LAYERS[-1] else relative.split(".")[0]


def cycle(graph: Iterable[Edge]) -> list[str]:
    """Return a cycle of a graph; empty if there is none."""
    targets: dict[str, set[str]] = {}
    for source, target in graph:
        targets.setdefault(source, set()).add(target)
    finished: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in finished:
            for target in sorted(targets.get(name, ())):
                if found := follow(target, [*path, name]):
                    return found
            finished.add(name)
        return []

    return next((found for name in sorted(targets) if (found := follow(name, []))), [])


def test_the_modules_import_each_other_without_cycles() -> None:
    assert not cycle(with_packages(edges()))


def test_the_parts_import_each_other_without_cycles() -> None:
    between = {(package(a), package(b)) for a, b in edges()}
    assert not cycle({(a, b) for a, b in between if a != b})


def test_no_layer_imports_one_above_it() -> None:
    assert not sorted((a, b) for a, b in edges() if layer(a) < layer(b))


def test_only_comm_mpi_and_the_benchmarks_import_mpi4py() -> None:
    users = {
        name
        for name, path in modules().items()
        if any(target.split(".")[0] == "mpi4py" for target in imported(ast.parse(path.read_text()), ()))
    }
    assert {name for name in users if package(name) != "bench"} == {"mpisparse.comm.mpi"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import mpisparse.sync as s", {"mpisparse.sync"}),
        ("from mpisparse import sync, attach", {"mpisparse.sync", "mpisparse"}),
        ("from mpisparse.sync import GradientSync", {"mpisparse.sync"}),
        ("def f():\n    from mpisparse import names", {"mpisparse.names"}),
        ("if TYPE_CHECKING:\n    from mpisparse.errors import suggest", {"mpisparse.errors"}),
    ],
)
def test_every_kind_of_import_is_seen(source: str, found: set[str]) -> None:
    assert set(imported(ast.parse(source), modules())) == found


def test_cycles_are_found() -> None:
    assert cycle([("a", "b"), ("b", "c"), ("c", "b"), ("d", "a")]) == ["b", "c", "b"]
    assert cycle([("a", "b"), ("a", "c"), ("b", "c")]) == []
