"""The standard product of two matrices (section 3) by tiles: naive, tiled, and as a single tile."""

from __future__ import annotations

import math
from typing import NamedTuple

from .two_level import Memory, blocks, check_least

__all__ = ["Tile", "gemm_naive", "gemm_perfect", "gemm_tiled", "largest_tile", "product"]


class Tile(NamedTuple):
    """The stationary block of a product (section B.1), and the depth by which operands are streamed."""

    rows: int
    columns: int
    depth: int


def largest_tile(words: int) -> Tile:
    """The largest square that fits beside a column of one operand and a row of the other.

    A product with it moves 2 m n k / sqrt(M) words plus lower-order terms: the leading term of Lemma E.8
    (`matmul`).

    Raises:
        ValueError: `words` is below 3.
    """
    check_least("words", words, 3)
    size = math.isqrt(words + 1) - 1  # size^2 + 2 size <= words
    return Tile(size, size, 1)


def product(memory: Memory, out: str, a: str, b: str, tile: Tile) -> None:
    """out = a b by tiles. Algorithms 2, 3 and 5 use this loop with cubic tiles."""
    (rows, depth), (_, columns) = memory.shape(a), memory.shape(b)
    memory.create(out, rows, columns)
    for i in blocks(rows, tile.rows):
        for j in blocks(columns, tile.columns):
            total = memory.zeros(i, j)
            for k in blocks(depth, tile.depth):
                left, right = memory.read(a, i, k), memory.read(b, k, j)
                memory.add_product(total, left, right)
                memory.delete(left, right)
            memory.write(total, out, i, j)
            memory.delete(total)


def gemm_naive(memory: Memory, out: str, a: str, b: str) -> None:
    """The product entry by entry (section 3): 2 m n k + m n words."""
    product(memory, out, a, b, Tile(1, 1, 1))


def gemm_tiled(memory: Memory, out: str, a: str, b: str) -> None:
    """The product with the largest square tile that the cache holds; close to the bound of Lemma E.8."""
    product(memory, out, a, b, largest_tile(memory.words))


def gemm_perfect(memory: Memory, out: str, a: str, b: str) -> None:
    """The product as one tile (section 3): operands are read once. The cache must hold all three matrices."""
    (rows, depth), (_, columns) = memory.shape(a), memory.shape(b)
    product(memory, out, a, b, Tile(rows, columns, depth))
