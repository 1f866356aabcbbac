"""The arguments that all passes of a traced program share: its scores, data and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from monoidreduce.folds.program.program import Program, parse
from monoidreduce.workspace import get_workspace

__all__ = [
    "NO_DATA",
    "NO_TABLES",
    "Counts",
    "Data",
    "Folded",
    "Operands",
    "ProgramCall",
    "Results",
    "Tables",
    "kept_data",
    "place",
]

# a [N, D], b [V, D], other_a [N, E], other_b [V, E]
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# Captured tensors that a program gathers from: reals, integers.
Tables: TypeAlias = tuple[Tensor | None, Tensor | None]
NO_TABLES: Tables = (None, None)
# Reals of rows, reals of columns, integers of rows, integers of columns; each [data, rows or V].
Data: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_DATA: Data = (None, None, None, None)
Counts: TypeAlias = tuple[int, int, int, int]  # of row reals, row integers, column reals, column integers
Folded: TypeAlias = tuple[Tensor, Tensor, Tensor]  # values, low words of log-sum-exps, indices
Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # the same, with payload sums behind the values


class ProgramCall(NamedTuple):
    """A program and what it is folded over.

    Attributes:
        program: its text (`Program.text`).
        scores: for each score its rows [N, width] and columns [V, width].
        scale: the factor of all scores.
        workspace: bytes for what backward passes store of scores; None: `get_workspace()`.
    """

    program: str
    scores: tuple[tuple[Tensor, Tensor], ...]
    data: Data
    scale: float
    tables: Tables = NO_TABLES
    workspace: int | None = None

    @property
    def parsed(self) -> Program:
        return parse(self.program)

    @property
    def a(self) -> Tensor:
        """The rows of the first score."""
        return self.scores[0][0]

    @property
    def b(self) -> Tensor:
        """The columns of the first score."""
        return self.scores[0][1]

    @property
    def operands(self) -> Operands:
        """Those of one or two scores, as kernels take them."""
        if len(self.scores) == 1:
            return *self.scores[0], None, None
        return *self.scores[0], *self.scores[1]

    @property
    def counts(self) -> Counts:
        row, column, row_index, column_index = self.data
        return _count(row), _count(row_index), _count(column), _count(column_index)

    @property
    def bytes(self) -> int:
        return get_workspace() if self.workspace is None else self.workspace


def _count(data: Tensor | None) -> int:
    return 0 if data is None else data.shape[0]


def kept_data(kept: Mapping[str, Sequence[int]], data: Data) -> Data:
    """The data that a derived program uses. kept: their numbers, by kind."""
    row, column, row_index, column_index = (
        None if t is None or not kept[kind] else _chosen(t, kept[kind])
        for kind, t in zip(("row", "column", "row_index", "column_index"), data, strict=True)
    )
    return row, column, row_index, column_index


def _chosen(t: Tensor, numbers: Sequence[int]) -> Tensor:
    """The rows of t with these indices. Not t[numbers]: a list is copied to the GPU, and the host waits."""
    return t if list(numbers) == [*range(len(t))] else torch.stack([t[number] for number in numbers])


def place(lines: Tensor, numbers: Sequence[int], to: Tensor) -> None:
    """Write `lines` to the rows of `to` with these indices."""
    for line, number in zip(lines, numbers, strict=True):
        to[number] = line
