"""Algorithms 7 to 9: the gradient g by blocks of whole rows, for a cache above d^2 words."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from monoidreduce._validate import check_choice

from .masks import keeps
from .tiles import gradient_of_scores, outer, sum_v, write_v
from .two_level import Memory, blocks, check_least

__all__ = ["BlockRows", "Order", "Policy", "block_rows", "large_cache"]

Policy = Literal["paper", "swapped", "fit"]
Order = Literal["rows", "columns"]


class BlockRows(NamedTuple):
    """Numbers of rows of a block: B_r for A1, A3, S, O, dO and l; B_c for A2 and h."""

    rows: int
    columns: int


def block_rows(n: int, d: int, words: int, policy: Policy, order: Order, sum_first: bool) -> BlockRows:
    """The two block sizes of phase 2.

    paper: B_r = min(ceil(M / 4d), d) and B_c = ceil(M / 4d), as in Algorithms 7 and 8. The stationary blocks,
        of B_r rows, stop growing at M = 4 d^2, so the I/O stops falling there, although Lemmas D.2 and D.4
        have T_r = O(n d / M). With g these blocks hold more than M words.
    swapped: the minimum is applied to the streamed blocks, B_c, as in FlashAttention.
    fit: the largest stationary block that fits beside g and one row of everything streamed.

    Raises:
        ValueError: an unknown `policy` or `order`, or (for "fit") the cache cannot hold g and a row of each
            matrix.
    """
    check_choice("policy", policy, get_args(Policy))
    check_choice("order", order, get_args(Order))
    quarter = -(-words // (4 * d))
    if policy == "paper":
        return BlockRows(min(quarter, d), quarter)
    if policy == "swapped":
        return BlockRows(quarter, min(quarter, d))
    if order == "rows":  # per stationary row: S, dO, A1, l, v, three scores, and dQ if sum_first
        streamed, stays = (d, 4 * d + 5) if sum_first else (2 * d, 3 * d + 5)
    else:  # per stationary column: h, A2, T and three entries; streamed: one matrix at a time, l and v
        streamed, stays = d + 2, 3 * d + 3
    check_least("words", words, d * d + streamed + stays)
    size = min(n, (words - d * d - streamed) // stays)
    return BlockRows(size, 1) if order == "rows" else BlockRows(1, size)


def phase_1_rows(n: int, d: int, words: int, policy: Policy, order: Order, sum_first: bool) -> BlockRows:
    """The two block sizes of phase 1: those of phase 2; for "fit", what fits beside a column of X or Y."""
    if policy == "fit":
        return BlockRows(min(n, (words - d) // (2 * d + 1)), 1)
    return block_rows(n, d, words, policy, order, sum_first)


def large_cache(
    memory: Memory,
    *,
    policy: Policy = "paper",
    order: Order = "rows",
    sum_first: bool = False,
    kept: Tensor | None = None,
) -> None:
    """Algorithm 9 (Theorem 4.1, D.5): Algorithm 7, then Algorithm 8; g stays in the cache.

    Args:
        memory: must have strict=False if the policy is "paper" or "swapped".
        policy: the block sizes, see `block_rows`.
        order: "rows", as printed: rows of S are stationary, rows of A2 and h are streamed. "columns": the
            other way round, and v is computed before.
        sum_first: False, as printed: lines 20 and 21 add (A1_i^T p_ij) A2_j to g for every pair of blocks.
            True: sum the products of a stationary block first, and multiply by its other factor once. For
            rows: dQ_i = sum_j p_ij A2_j, then g += A1_i^T dQ_i. For columns: T_j = sum_i A1_i^T p_ij, then
            g += T_j A2_j.
        kept: bool [n, n], the pairs that the mask keeps (default: all).

    Raises:
        ValueError: an unknown `policy` or `order`, or the cache is too small for the policy "fit".
    """
    n, d = memory.shape("A1")
    size = block_rows(n, d, memory.words, policy, order, sum_first)
    compute_s_and_h(memory, phase_1_rows(n, d, memory.words, policy, order, sum_first))
    memory.end_phase("S, h")
    g = memory.zeros(slice(0, d), slice(0, d))
    (rows_stay if order == "rows" else columns_stay)(memory, size, sum_first, kept, g)
    memory.create("g", d, d)
    memory.write(g, "g")
    memory.delete(g)
    memory.end_phase("g")


def compute_s_and_h(memory: Memory, size: BlockRows) -> None:
    """Algorithm 7: S = A1 X and h = A3 Y (Lemmas D.1, D.2)."""
    n, d = memory.shape("A1")
    memory.create("S", n, d)
    memory.create("h", n, d)
    for i in blocks(n, size.rows):
        a1, a3 = memory.read("A1", i), memory.read("A3", i)
        for j in blocks(d, size.columns):
            for rows, weight, out in ((a1, "X", "S"), (a3, "Y", "h")):
                column, total = memory.read(weight, columns=j), memory.zeros(i, j)
                memory.add_product(total, rows, column)
                memory.write(total, out, i, j)
                memory.delete(total, column)
        memory.delete(a1, a3)


def rows_stay(memory: Memory, size: BlockRows, sum_first: bool, kept: Tensor | None, g: Tensor) -> None:
    """Algorithm 8 (Lemmas D.3, D.4).

    Blocks are read late and deleted early: O is deleted before S is read.
    """
    n, d = memory.shape("A1")
    width = slice(0, d)
    for i in blocks(n, size.rows):
        upstream = memory.read("dO", i)
        v = sum_v(memory, upstream, i)
        s, a1, sums = memory.read("S", i), memory.read("A1", i), memory.read("l", i)
        dq = memory.zeros(i, width) if sum_first else None
        for j in blocks(n, size.columns):
            if not keeps(kept, i, j):
                continue
            h = memory.read("h", j)
            q = outer(memory, upstream, h)
            memory.delete(h)
            a2 = memory.read("A2", j)
            scores = outer(memory, s, a2)
            p = gradient_of_scores(memory, scores, q, sums, v, kept, i, j)
            if dq is None:
                t = memory.zeros(width, j)
                memory.add_product(t, a1.T, p)
                memory.add_product(g, t, a2)
                memory.delete(t)
            else:
                memory.add_product(dq, p, a2)
            memory.delete(p, a2)
        if dq is not None:
            memory.add_product(g, a1.T, dq)
            memory.delete(dq)
        memory.delete(upstream, v, s, a1, sums)


def columns_stay(memory: Memory, size: BlockRows, sum_first: bool, kept: Tensor | None, g: Tensor) -> None:
    """Algorithm 8 with its two loops exchanged: h, A2 and T are stationary; dO, S and A1 are streamed."""
    n, d = memory.shape("A1")
    width = slice(0, d)
    write_v(memory, size.rows)
    for j in blocks(n, size.columns):
        h, a2, t = memory.read("h", j), memory.read("A2", j), memory.zeros(width, j)
        for i in blocks(n, size.rows):
            if not keeps(kept, i, j):
                continue
            upstream = memory.read("dO", i)
            q = outer(memory, upstream, h)
            memory.delete(upstream)
            s = memory.read("S", i)
            scores = outer(memory, s, a2)
            memory.delete(s)
            sums, v = memory.read("l", i), memory.read("v", i)
            p = gradient_of_scores(memory, scores, q, sums, v, kept, i, j)
            memory.delete(sums, v)
            a1 = memory.read("A1", i)
            memory.add_product(t, a1.T, p)
            memory.delete(a1, p)
            if not sum_first:
                memory.add_product(g, t, a2)
                memory.delete(t)
                t = memory.zeros(width, j)
        if sum_first:
            memory.add_product(g, t, a2)
        memory.delete(h, a2, t)
