"""The memory that `reader.evaluate` takes for an element: how large a chunk fits into the workspace."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS
from monoidreduce.folds.program.program import operands
from monoidreduce.folds.torch.reader import releases

__all__ = ["bytes_of_element"]

_ROWS, _COLUMNS = frozenset({"row"}), frozenset({"column"})
_AXES = dict.fromkeys(("row", "row_index", "batch", "head", "query"), _ROWS)
_AXES |= dict.fromkeys(("column", "column_index", "position"), _COLUMNS)
_AXES |= dict.fromkeys(("score", "other", "third", "fourth", "upstream"), _ROWS | _COLUMNS)
_INTERMEDIATE = 48  # bytes of the integers that a random number is made of (program/streams.py)


def bytes_of_element(nodes: Sequence[Node], numbers: Collection[int], dtype: torch.dtype) -> int:
    """The most bytes that an element has at a time while these nodes are computed in this dtype.

    The nodes' values stay. A number of a row or of a column counts as nothing.
    """
    axes: dict[int, frozenset[str]] = {}
    held: dict[int, int] = {}  # by each node with a value: the bytes of an element
    most = 0
    for number, done in releases(nodes, numbers):
        name, arguments = nodes[number][0], operands(nodes[number])
        axes[number] = _AXES.get(name, frozenset()).union(*(axes[i] for i in arguments))
        kinds = (LEAVES[name],) if name in LEAVES else OPERATIONS[name].kinds
        of_element = axes[number] == _ROWS | _COLUMNS
        held[number] = _bytes(kinds[-1], dtype) if of_element else 0
        # What an operation makes on its way to the result, as "share" does of two differences.
        beside = _INTERMEDIATE if "index" in kinds else dtype.itemsize
        most = max(most, sum(held.values()) + (beside if of_element else 0))
        for i in done:
            del held[i]
    return most


def _bytes(kind: str, dtype: torch.dtype) -> int:
    return {"real": dtype.itemsize, "bool": 1}.get(kind, 8)
