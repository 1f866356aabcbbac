"""Steps shared by the schedules that recompute p tile by tile from the results of the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import masked_exp
from .two_level import COLUMN, Memory, blocks

__all__ = ["gradient_from", "gradient_of_scores", "outer", "probabilities", "sum_v", "write_v"]


def outer(memory: Memory, a: Tensor, b: Tensor) -> Tensor:
    """A new block a b^T of two blocks of rows: scores, or q (Definition B.8)."""
    total = memory.zeros(slice(0, a.shape[0]), slice(0, b.shape[0]))
    memory.add_product(total, a, b.T)
    return total


def probabilities(
    memory: Memory, query: Tensor, key: Tensor, sums: Tensor, kept: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """A new block f = diag(l)^-1 exp(Q K^T), the softmax probabilities (Definition B.5)."""
    f = outer(memory, query, key)
    memory.update(f, masked_exp(kept, rows, columns))
    memory.update(f, torch.div, sums)
    return f


def gradient_from(memory: Memory, q: Tensor, f: Tensor, v: Tensor) -> None:
    """Overwrite q by p = f o (q - v), the gradient of the scores (Definition B.9)."""
    memory.update(q, lambda q, f, v: f * (q - v), f, v)


def sum_v(memory: Memory, upstream: Tensor, rows: slice) -> Tensor:
    """v = (dO o O) 1, the delta of FlashAttention, for a block of rows (Definition B.9).

    upstream: dO of these rows, in the cache. Reads O.
    """
    out, v = memory.read("O", rows), memory.zeros(rows, COLUMN)
    memory.add_row_sums(v, upstream, out)
    memory.delete(out)
    return v


def write_v(memory: Memory, size: int) -> None:
    """Compute v of all rows and write it to memory, by blocks of `size` rows."""
    n, _ = memory.shape("dO")
    memory.create("v", n, 1)
    for i in blocks(n, size):
        upstream = memory.read("dO", i)
        v = sum_v(memory, upstream, i)
        memory.write(v, "v", i)
        memory.delete(upstream, v)


def gradient_of_scores(
    memory: Memory,
    scores: Tensor,
    q: Tensor,
    sums: Tensor,
    v: Tensor,
    kept: Tensor | None,
    rows: slice,
    columns: slice,
) -> Tensor:
    """A new block p = f o q - diag(v) f with f = diag(l)^-1 exp(scores) (Definitions B.5, B.9).

    It replaces the blocks `scores` and `q`, which are deleted.
    """
    memory.update(scores, masked_exp(kept, rows, columns))
    f = memory.compute(torch.div, scores, sums)
    memory.delete(scores)
    p = memory.compute(lambda f, q, v: f * q - v * f, f, q, v)
    memory.delete(f, q)
    return p
