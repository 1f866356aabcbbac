"""`kept=` of the linear losses in functions of `statistics`: whether a row keeps a column.

The words of rows are a table (`Statistics._with_words`), from which an element reads its word. shift, data of
columns, brings the bit of a column to the front of its word, by a product that wraps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce.folds.program.tracing import WORDS

__all__ = ["in_64_bits", "is_kept", "shifts"]


def is_kept(row: Any, column: Any, shift: Any) -> Any:
    """The condition, in a traced function with these arguments."""
    return WORDS[row, column // 64] * shift < 0


def shifts(classes: Tensor) -> Tensor:
    """The data `shift` of these classes, [V] int64 each."""
    return torch.ones_like(classes) << 63 - classes % 64


def in_64_bits(words: Tensor) -> Tensor:
    """Pairs of words as one, [rows, words]: at least one, of at least one row.

    The sizes of a table are constants of the compiled program. So the number of rows becomes a power of two,
    and other numbers of tokens compile few others.
    """
    rows, count = words.shape
    lines = max(rows, 1) if torch.compiler.is_compiling() else 1 << max(rows - 1, 0).bit_length()
    padding = (0, 2 - count if count < 2 else count % 2, 0, lines - rows)
    if any(padding):
        words = torch.nn.functional.pad(words, padding)
    return words.contiguous().view(torch.int64)
