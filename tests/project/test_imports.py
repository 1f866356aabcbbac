"""What stands beside the operators imports them, and never the other way; no import closes a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import monoidreduce

PACKAGE = Path(monoidreduce.__file__).parent

# What each part of the package may import. All else is the core: operators, their ops, monoids and laws.
CORE, FOLDS, RANKS = "core", "folds", "distributed"
MAY_IMPORT = {
    CORE: (CORE,),
    FOLDS: (CORE, FOLDS),
    RANKS: (CORE, FOLDS, RANKS),
    "integrations": (CORE, FOLDS, RANKS, "integrations"),
    "hardware": (CORE,),  # of theory: the facts of GPUs, for which calls are explained
    "inspection": (CORE, FOLDS, "hardware"),
    "theory": (CORE, FOLDS, "hardware", "inspection", "theory"),
}
PARTS = {
    "folds": FOLDS,
    "distributed": RANKS,
    "integrations": "integrations",
    "theory.hardware": "hardware",
    "inspection": "inspection",
    "theory": "theory",
}
# What users import and run. It may import everything, and nothing else imports it.
FRONT = ("__init__", "__main__", "demo", "hardware", "io", "plan", "stat")


class Import(NamedTuple):
    module: str  # that is imported, without "monoidreduce."
    line: int
    in_function: bool


def modules() -> dict[str, Path]:
    """Files by the names of their modules, without "monoidreduce."; of a package, that of its `__init__`."""
    return {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = modules()


def imports(name: str, source: str, known: dict[str, Path]) -> Iterator[Import]:
    """The modules of the package that a module imports when it runs: not those for types alone."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.partition(".")[0] == "monoidreduce":
                        yield Import(alias.name.partition(".")[2] or "__init__", child.lineno, in_function)
            elif isinstance(child, ast.ImportFrom):
                of = source_of(child)
                if of is not None:
                    for alias in child.names:
                        full = f"{of}.{alias.name}".removeprefix(".")
                        found = full if full in known else of or "__init__"
                        if full != "_C":
                            yield Import(found, child.lineno, in_function)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, in_function or function)

    def source_of(node: ast.ImportFrom) -> str | None:
        """The package or module of `from ... import`; None outside of monoidreduce."""
        if node.level == 0:
            top, _, rest = (node.module or "").partition(".")
            return rest if top == "monoidreduce" else None
        package = name.split(".") if known[name].name == "__init__.py" else name.split(".")[:-1]
        package = [] if name == "__init__" else package
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    return walk(ast.parse(source), False)


ALL = {name: list(imports(name, file.read_text("utf-8"), MODULES)) for name, file in MODULES.items()}


def part_of(module: str) -> str:
    found = [part for part in PARTS if module == part or module.startswith(f"{part}.")]
    return PARTS[max(found, key=len)] if found else CORE


def is_front(module: str) -> bool:
    return module.partition(".")[0] in FRONT


def ancestors(module: str) -> set[str]:
    """The packages that a module is in, which are imported before it."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_all_modules_are_looked_at() -> None:
    assert {"__init__", "functional", "_ops.attention", "folds.statistics", "theory.io.bounds"} <= ALL.keys()
    assert Import("_ops.registry", 2, True) in list(
        imports("varlen", "def f():\n    from monoidreduce._ops.registry import call_op", MODULES)
    )
    assert list(imports("theory.io.masks", "from .graph import Graph", MODULES)) == [
        Import("theory.io.graph", 1, False)
    ]


@pytest.mark.parametrize("name", [name for name in ALL if not is_front(name)])
def test_direction(name: str) -> None:
    allowed = MAY_IMPORT[part_of(name)]
    refused = [
        f"{MODULES[name].relative_to(PACKAGE)}:{line} imports {module}"
        for module, line, _ in ALL[name]
        if is_front(module) or part_of(module) not in allowed
    ]
    assert refused == []


def test_there_is_no_cycle() -> None:
    """Nor one through the package of a module that is imported, which runs first."""
    graph = {
        name: {
            needed
            for module, _, _ in found
            for needed in ({module} | ancestors(module) - ancestors(name)) & MODULES.keys()
            if needed != name
        }
        for name, found in ALL.items()
        if name != "__init__"  # which every import of the package runs first, and no module waits for
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_imports_within_functions_say_why() -> None:
    """A comment on the line, or on the line above it."""
    silent = []
    for name, found in ALL.items():
        lines = MODULES[name].read_text("utf-8").splitlines()
        for _, line, in_function in found:
            if in_function and not ("#" in lines[line - 1] or lines[line - 2].lstrip().startswith("#")):
                silent.append(f"{MODULES[name].relative_to(PACKAGE)}:{line}")
    assert silent == []
