"""The masks of attention that kernels know by themselves: causal masks and windows, also in packed sequences.

Masks that users write (mask_mod, block_mask) come on top: they are part of a program
(folds/program_scores.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import launch_on
from monoidreduce._validate import mismatch

__all__ = ["Mask", "band", "packed_mask"]


class Mask(NamedTuple):
    """The range of keys that each query sees.

    Query i of M is aligned with key i + N - M of N, so the last query is aligned with the last key. In packed
    sequences this holds within each sequence.

    Attributes:
        left, right: a query sees this many keys before and after the key that it is aligned with; -1 is all.
            A causal mask has right = 0. With spans both are -1, because the spans include the window.
        row_spans: [M, 2] int64, the first key that each query sees, and the last one + 1. None unless
            sequences are packed.
        column_spans: [N, 2] int64, the first query that sees each key, and the last one + 1.
    """

    left: int = -1
    right: int = -1
    row_spans: Tensor | None = None
    column_spans: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return self.row_spans is not None

    def bounds(self, rows: int, columns: int, device: torch.device) -> Tensor | None:
        """[2, rows] int64: the first column that each row sees, and the last one + 1; None if all rows see
        all columns."""
        if self.row_spans is not None:
            return self.row_spans.T
        if self.left < 0 and self.right < 0:
            return None
        aligned = torch.arange(columns - rows, columns, device=device)
        first = aligned - self.left if self.left >= 0 else torch.zeros_like(aligned)
        stop = aligned + self.right + 1 if self.right >= 0 else torch.full_like(aligned, columns)
        return torch.stack((first, stop))

    def undefine(self, *results: Tensor) -> None:
        """Fill results on a GPU with NaN if cu_seqlens are not ascending or out of bounds.

        The host does not know their values. The CPU engine has raised an error before.
        """
        for result in results:
            if result.is_cuda and self.row_spans is not None and self.column_spans is not None:
                spans = self.row_spans if self.row_spans.shape[0] else self.column_spans
                _C.undefine(result.view(-1), spans, *launch_on(result))


@lru_cache(1024)
def band(left: int, right: int) -> Mask:
    """The mask of sequences that are not packed. Cached, because finding it is faster than making it."""
    return Mask(left, right)


def packed_mask(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    window: tuple[int, int],
    first: int = 0,
    tokens: int | None = None,
) -> Mask:
    """The mask of packed sequences. Kernels make the spans, so the host never waits for the lengths.

    Args:
        q, k: [1, H, T, F] and [1, Hkv, S, F].
        window: left and right, within each sequence.
        first, tokens: q holds the queries `first` to `first + T` of `tokens`. Spans of all are made, and cut,
            because the alignment of a sequence depends on all its queries. None: q holds all.
    """
    queries, keys = q.shape[2], k.shape[2]
    tokens = queries if tokens is None else tokens
    row_spans = q.new_empty(tokens, 2, dtype=torch.int64)
    column_spans = q.new_empty(keys, 2, dtype=torch.int64)
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if t.numel() > 0 and t.data_ptr() == 0:  # such as a fake tensor, which .long() would accept
            raise TypeError(mismatch(name, "a tensor with memory of its own", type(t)))
    query_starts = cu_seqlens_q.long().contiguous()
    key_starts = query_starts if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.long().contiguous()
    _C.sequence_spans(row_spans, column_spans, query_starts, key_starts, *window, *launch_on(q))
    if queries != tokens:
        row_spans = row_spans[first : first + queries]
        column_spans = (column_spans - first).clamp_(0, queries)
    return Mask(row_spans=row_spans, column_spans=column_spans)
