"""Algorithms 2 to 6: the gradient g by products of square blocks, for a cache below d^2 words."""

from __future__ import annotations

import math

import torch

from .products import Tile, product
from .two_level import COLUMN, Memory, blocks, check_least

__all__ = ["block_size", "small_cache"]


def block_size(words: int) -> int:
    """B = floor(sqrt(M / 4)): three blocks and a vector fit, 3 B^2 + B <= M (Lemma C.5).

    Raises:
        ValueError: `words` is below 4, so a block would be empty.
    """
    check_least("words", words, 4)
    return math.isqrt(words // 4)


def small_cache(memory: Memory) -> None:
    """Algorithm 6 (Theorem 4.3, C.12): Algorithms 2 to 5 in turn. All n x n matrices are stored in memory."""
    size = block_size(memory.words)
    cube = Tile(size, size, size)
    compute_f(memory, cube)
    memory.end_phase("f")
    compute_q(memory, cube)
    memory.end_phase("q")
    compute_p(memory, size)
    memory.end_phase("p")
    compute_g(memory, cube)
    memory.end_phase("g")


def compute_f(memory: Memory, cube: Tile) -> None:
    """Algorithm 2: f = diag(l)^-1 exp(S A2^T) with S = A1 X (Lemmas C.4, C.5)."""
    n, d = memory.shape("A1")
    product(memory, "S", "A1", "X", cube)
    memory.create("A", n, n)
    memory.create("f", n, n)
    for i in blocks(n, cube.rows):
        sums = memory.zeros(i, COLUMN)
        for j in blocks(n, cube.columns):
            a = memory.zeros(i, j)
            for k in blocks(d, cube.depth):
                s, a2 = memory.read("S", i, k), memory.read("A2.T", k, j)
                memory.add_product(a, s, a2)
                memory.delete(s, a2)
            memory.update(a, torch.exp)
            memory.write(a, "A", i, j)
            memory.add_row_sums(sums, a)
            memory.delete(a)
        for j in blocks(n, cube.columns):
            a = memory.read("A", i, j)
            f = memory.compute(torch.div, a, sums)
            memory.write(f, "f", i, j)
            memory.delete(a, f)
        memory.delete(sums)


def compute_q(memory: Memory, cube: Tile) -> None:
    """Algorithm 3: q = dO h^T with h = A3 Y (Lemmas C.6, C.7)."""
    product(memory, "h", "A3", "Y", cube)
    product(memory, "q", "dO", "h.T", cube)


def compute_p(memory: Memory, size: int) -> None:
    """Algorithm 4: p = f o q - diag((f o q) 1) f (Lemma C.8).

    It reads f and q twice and writes p once, so it moves 5 n^2 words whatever the cache. Lemma C.9 says
    O(n^2 / sqrt(M)), because its proof divides by B^3 although there are (n / B)^2 blocks. Theorem C.12 still
    holds, since n^2 <= n^2 d / sqrt(M) for a small cache.
    """
    n, _ = memory.shape("f")
    memory.create("p", n, n)
    for i in blocks(n, size):
        v = memory.zeros(i, COLUMN)
        for j in blocks(n, size):
            f, q = memory.read("f", i, j), memory.read("q", i, j)
            memory.add_row_sums(v, f, q)
            memory.delete(f, q)
        for j in blocks(n, size):
            f, q = memory.read("f", i, j), memory.read("q", i, j)
            p = memory.compute(lambda f, q, v: f * q - v * f, f, q, v)
            memory.delete(f, q)
            memory.write(p, "p", i, j)
            memory.delete(p)
        memory.delete(v)


def compute_g(memory: Memory, cube: Tile) -> None:
    """Algorithm 5: g = T A2 with T = A1^T p (Lemmas C.10, C.11)."""
    product(memory, "T", "A1.T", "p", cube)
    product(memory, "g", "T", "A2", cube)
