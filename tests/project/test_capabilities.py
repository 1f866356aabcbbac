"""The package asks a plan, or the table of families, what kernels can do: never which family they are of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from monoidreduce import _C

PACKAGE = Path(__file__).resolve().parents[2] / "monoidreduce"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TENSOR_CORES = re.compile(
    "|".join(rf"[\"']{n}[\"']" for n, family in _C.FAMILIES.items() if family.tensor_cores)
)


def names(node: ast.AST) -> set[str]:
    constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return {str(value) for value in constants} & {*_C.FAMILIES}


def compared(source: str) -> list[int]:
    """The lines where a name of a family is compared with anything, by operators or by patterns."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Compare, ast.MatchValue)))
    return [node.lineno for node in nodes if names(node)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_family_is_asked_for(path: Path) -> None:
    assert compared(path.read_text("utf-8")) == []


def test_families_of_tensor_cores_are_named_once() -> None:
    """In the table of the cost model, whose constants were measured."""
    lines = {
        f"{path.relative_to(PACKAGE)}: {line.split(' = ')[0]}"
        for path in SOURCES
        for line in path.read_text("utf-8").splitlines()
        if TENSOR_CORES.search(line)
    }
    assert lines == {"theory/costs/model.py: _UNMEASURED"}


@pytest.mark.parametrize("line", ('t == "sm90"', 'if "simt" != t: pass', 't in ("sm80", "sm90")'))
def test_a_family_that_is_asked_for_is_found(line: str) -> None:
    assert compared(line) == [1]


def test_capabilities_are_those_of_the_table() -> None:
    assert [*_C.FAMILIES] == ["simt", "sm80", "sm90", "planes"]
    assert [family.name for family in _C.FAMILIES.values()] == [*_C.FAMILIES]
    assert [family.tensor_cores for family in _C.FAMILIES.values()] == [False, True, True, True]
    assert [family.planes for family in _C.FAMILIES.values()] == [False, False, False, True]
    assert [family.architecture for family in _C.FAMILIES.values()] == [None, None, "sm_90a", "sm_90a"]
