"""The operands and the data of a program's call, as passes hand them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

__all__ = ["Data", "Operands", "Tables", "place"]

# a [N, D], b [V, D], other_a [N, E], other_b [V, E]
Operands: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Tables: TypeAlias = tuple[Tensor | None, Tensor | None]
Data: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def place(lines: Tensor, numbers: Sequence[int], to: Tensor) -> None:
    """Write lines to the lines of `to` with these numbers."""
    for line, number in zip(lines, numbers, strict=True):
        to[number] = line
