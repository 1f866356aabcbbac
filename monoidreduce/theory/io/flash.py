"""FlashAttention's passes, and a backward pass with stationary rows.

A stationary block is as large as the cache allows beside one row of everything that is streamed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import keeps, masked_exp
from .products import gemm_tiled
from .tiles import gradient_from, gradient_of_scores, outer, probabilities, sum_v, write_v
from .two_level import COLUMN, Memory, blocks, check_least

__all__ = [
    "backward_block",
    "compute_gradients",
    "flash1_backward",
    "flash2_backward",
    "flash_forward",
    "flash_rows",
    "forward_block",
    "forward_by_tiles",
    "rows_block",
]


def forward_block(n: int, d: int, words: int) -> int:
    """Stationary rows in `flash_forward`: Q, O, l and a score each, beside one row of K or V."""
    return _largest(n, words, d, 2 * d + 2)


def backward_block(n: int, d: int, words: int) -> int:
    """Stationary columns in the backward passes: K, V, dK, dV and two scores each, beside one row of Q, dO,
    dQ, l and v."""
    return _largest(n, words, 3 * d + 2, 4 * d + 2)


def rows_block(n: int, d: int, words: int) -> int:
    """Stationary rows in `flash_rows`: Q, dO, dQ, l, v and three scores each, beside one row of K and V."""
    return _largest(n, words, 2 * d, 3 * d + 5)


def _largest(n: int, words: int, streamed: int, stays: int) -> int:
    check_least("words", words, streamed + stays)
    return min(n, (words - streamed) // stays)


def flash_forward(memory: Memory, *, kept: Tensor | None = None) -> None:
    """The forward pass of FlashAttention-2: O and l (Definitions B.4, B.7). Rows are stationary.

    The row max is left out; it would stay in the cache and move nothing. Values are float64 here.
    """
    forward_by_tiles(memory, kept, forward_block(*memory.shape("Q"), memory.words), 1)


def forward_by_tiles(memory: Memory, kept: Tensor | None, rows: int, columns: int) -> None:
    """O and l by tiles of `rows` stationary rows and `columns` columns."""
    n, d = memory.shape("Q")
    memory.create("O", n, d)
    memory.create("l", n, 1)
    for i in blocks(n, rows):
        q, out, sums = memory.read("Q", i), memory.zeros(i, slice(0, d)), memory.zeros(i, COLUMN)
        for j in blocks(n, columns):
            if not keeps(kept, i, j):
                continue
            k = memory.read("K", j)
            weights = outer(memory, q, k)
            memory.delete(k)
            memory.update(weights, masked_exp(kept, i, j))
            memory.add_row_sums(sums, weights)
            v = memory.read("V", j)
            memory.add_product(out, weights, v)
            memory.delete(v, weights)
        memory.update(out, torch.div, sums)
        memory.write(out, "O", i)
        memory.write(sums, "l", i)
        memory.delete(q, out, sums)


def flash1_backward(memory: Memory, *, kept: Tensor | None = None) -> None:
    """The backward pass of FlashAttention-1: dQ, dK, dV. Columns are stationary.

    v (delta, the row sums of dO o O) is recomputed from O in every tile.
    """
    compute_gradients(memory, kept, backward_block(*memory.shape("Q"), memory.words), v_in_memory=False)


def flash2_backward(memory: Memory, *, kept: Tensor | None = None) -> None:
    """The backward pass of FlashAttention-2: dQ, dK, dV.

    Columns are stationary; v is computed once before.
    """
    size = backward_block(*memory.shape("Q"), memory.words)
    write_v(memory, 1)
    memory.end_phase("v")
    compute_gradients(memory, kept, size, v_in_memory=True)
    memory.end_phase("dQ, dK, dV")


def compute_gradients(
    memory: Memory,
    kept: Tensor | None,
    columns: int,
    *,
    rows: int = 1,
    v_in_memory: bool,
    cleared: bool = False,
) -> None:
    """dQ, dK and dV by tiles of `columns` stationary columns and `rows` rows.

    v_in_memory: read v instead of recomputing it. cleared: dQ is already in memory, filled with zeros;
    otherwise the first tile of each row block starts it from zeros in the cache.
    """
    n, d = memory.shape("Q")
    width = slice(0, d)
    for name in ("dK", "dV") if cleared else ("dQ", "dK", "dV"):
        memory.create(name, n, d)
    begun = {i.start for i in blocks(n, rows)} if cleared else set()  # rows whose dQ is in memory
    for j in blocks(n, columns):
        key, value = memory.read("K", j), memory.read("V", j)
        d_key, d_value = memory.zeros(j, width), memory.zeros(j, width)
        for i in blocks(n, rows):
            if not keeps(kept, i, j):
                continue
            query, upstream, sums = memory.read("Q", i), memory.read("dO", i), memory.read("l", i)
            v = memory.read("v", i) if v_in_memory else sum_v(memory, upstream, i)
            f = probabilities(memory, query, key, sums, kept, i, j)
            memory.add_product(d_value, f.T, upstream)
            p = outer(memory, upstream, value)
            gradient_from(memory, p, f, v)
            memory.delete(f, upstream, sums, v)
            d_query = memory.read("dQ", i) if i.start in begun else memory.zeros(i, width)
            begun.add(i.start)
            memory.add_product(d_query, p, key)
            memory.add_product(d_key, p.T, query)
            memory.write(d_query, "dQ", i)
            memory.delete(query, p, d_query)
        memory.write(d_key, "dK", j)
        memory.write(d_value, "dV", j)
        memory.delete(key, value, d_key, d_value)


def flash_rows(memory: Memory, *, kept: Tensor | None = None) -> None:
    """The paper's gradient g without holding g in the cache: first dQ, then the product g = A1^T dQ.

    Rows are stationary. S = A1 X, h = A3 Y and g are products with the largest tiles, so a cache below d^2
    words is enough.
    """
    n, d = memory.shape("A1")
    size = rows_block(n, d, memory.words)
    gemm_tiled(memory, "S", "A1", "X")
    gemm_tiled(memory, "h", "A3", "Y")
    memory.end_phase("S, h")
    memory.create("dQ", n, d)
    for i in blocks(n, size):
        upstream = memory.read("dO", i)
        v = sum_v(memory, upstream, i)
        s, sums, dq = memory.read("S", i), memory.read("l", i), memory.zeros(i, slice(0, d))
        for j in blocks(n, 1):
            if not keeps(kept, i, j):
                continue
            h, a2 = memory.read("h", j), memory.read("A2", j)
            q, scores = outer(memory, upstream, h), outer(memory, s, a2)
            p = gradient_of_scores(memory, scores, q, sums, v, kept, i, j)
            memory.add_product(dq, p, a2)
            memory.delete(h, a2, p)
        memory.write(dq, "dQ", i)
        memory.delete(upstream, v, s, sums, dq)
    memory.end_phase("dQ")
    gemm_tiled(memory, "g", "A1.T", "dQ")
    memory.end_phase("g")
