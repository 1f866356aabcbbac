"""Types of the operands and data of a program's call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

__all__ = ["NO_TABLES", "Data", "Operands", "Tables", "place"]

# a [N, D], b [V, D], other_a [N, E], other_b [V, E]
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# Captured tensors that a program gathers from: reals, integers.
Tables: TypeAlias = tuple[Tensor | None, Tensor | None]
NO_TABLES: Tables = (None, None)
# Reals of rows, reals of columns, integers of rows, integers of columns; each [data, rows or V].
Data: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def place(lines: Tensor, numbers: Sequence[int], to: Tensor) -> None:
    """Write `lines` to the rows of `to` with these indices."""
    for line, number in zip(lines, numbers, strict=True):
        to[number] = line
