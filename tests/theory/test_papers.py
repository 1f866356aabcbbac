"""docs/papers.md: what it names is there; and claims of the papers that no other file checks."""

from __future__ import annotations

import ast
import doctest
import re
from itertools import permutations
from pathlib import Path

import pytest
import torch

import monoidreduce as mr
from monoidreduce import plan
from monoidreduce.io import REGISTERS, TracedMemory, gemm_tiled, partition_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text("utf-8")
ROWS = [
    line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line
]


def test_what_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:tests|monoidreduce|examples|docs)/[\w./]+)(?:::(\w+))?`", TEXT)
    assert len(named) > 80
    for path, name in named:
        assert (ROOT / path).exists(), path
        if name:
            tree = ast.parse((ROOT / path).read_text("utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                path,
                name,
            )


def test_names_of_the_planner_and_of_io() -> None:
    for name in re.findall(r"`plan\.(\w+)`", TEXT):
        assert name in plan.__all__, name


def test_every_line_says_where_and_what_checks_it() -> None:
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


def test_the_session_of_the_page() -> None:
    examples = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "papers.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert failed == 0 and attempted >= 4


def mlp(rows: int, hidden: int, width: int) -> mr.Cost:
    shapes = (rows, width), (hidden, width), (width, hidden)
    tensors = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return mr.cost("mlp", *tensors, hardware="h100")


def test_an_mlp_with_few_hidden_units_saves_nothing() -> None:
    """MonoidReduce, section 3: viable if K >> M, little to no benefit if K is about M."""
    rows = 16384
    assert mlp(rows, 16384, 128).peak_memory < 0.02 * 2 * rows * 16384
    assert mlp(rows, 4096, 4096).peak_memory > 2 * rows * 4096


def test_a_product_takes_as_long_in_any_order() -> None:
    """Fact B.2 of the paper on I/O, of standard products."""
    assert len({plan.gemm(*sizes) for sizes in permutations((3, 5, 7))}) == 1


@pytest.mark.parametrize(("rows", "depth", "squares"), [(8, 4, 1), (8, 4, 2), (8, 4, 4), (16, 8, 4)])
def test_parts_of_a_tiled_product_have_few_nodes(rows: int, depth: int, squares: int) -> None:
    """Lemma E.7: O(M^2 / d) nodes of a part of an M-partition, for M from d^2 on; the constant is 1 here."""
    memory = TracedMemory(squares * depth**2, {"X": (rows, depth), "Y": (depth, rows)})
    gemm_tiled(memory, "XY", "X", "Y")
    pebbles = memory.peak + REGISTERS
    parts = partition_of(memory.graph, memory.moves, pebbles)  # a partition of twice as many
    assert max(map(len, parts)) <= (2 * pebbles) ** 2 / depth
