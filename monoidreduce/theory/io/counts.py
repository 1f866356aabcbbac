"""The number of words that each schedule moves, in closed form; equal to the simulator's count at any size.

Each function raises ValueError if a size is below 1, or if the cache is too small for the schedule.
"""

from __future__ import annotations

from .flash import backward_block, forward_block, rows_block
from .large_cache import Order, Policy, block_rows, phase_1_rows
from .products import Tile, largest_tile
from .small_cache import block_size
from .two_level import check_least, check_sizes

__all__ = [
    "flash1_backward_words",
    "flash2_backward_words",
    "flash_forward_words",
    "flash_rows_words",
    "large_cache_words",
    "no_cache_words",
    "product_words",
    "small_cache_words",
]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def product_words(rows: int, columns: int, depth: int, tile: Tile) -> int:
    """`product`: reads the left operand once per column of tiles, and the right one once per row of tiles."""
    left, right = rows * depth * _ceil(columns, tile.columns), depth * columns * _ceil(rows, tile.rows)
    return left + right + rows * columns


def no_cache_words(n: int, d: int, words: int) -> int:
    """`no_cache`, Algorithm 1. The cache holds f, q and p."""
    check_sizes(n=n, d=d)
    check_least("words", words, 3 * n * n + 2 * n * d + n)
    return 4 * n * d + 3 * d * d


def small_cache_words(n: int, d: int, words: int) -> int:
    """`small_cache`, Algorithm 6.

    If B = floor(sqrt(M / 4)) divides n and d, it is 6 (n^2 d + n d^2) / B + 9 n^2 + 3 n d + d^2.
    """
    check_sizes(n=n, d=d)
    size = block_size(words)
    cube = Tile(size, size, size)
    inner, scores = product_words(n, d, d, cube), product_words(n, n, d, cube)
    compute_f = inner + scores + 2 * n * n
    compute_q = inner + scores
    compute_p = 5 * n * n
    compute_g = product_words(d, n, n, cube) + product_words(d, d, n, cube)
    return compute_f + compute_q + compute_p + compute_g


def large_cache_words(
    n: int,
    d: int,
    words: int,
    *,
    policy: Policy = "paper",
    order: Order = "rows",
    sum_first: bool = False,
) -> int:
    """`large_cache`, Algorithm 9.

    As printed in the paper: 8 n d + n + d^2 + ceil(n / B_r) (2 n d + 2 d^2) with B_r = min(ceil(M / 4d), d).
    """
    check_sizes(n=n, d=d, words=words)
    first = phase_1_rows(n, d, words, policy, order, sum_first)
    size = block_rows(n, d, words, policy, order, sum_first)
    s_and_h = 2 * (n * d + _ceil(n, first.rows) * d * d + n * d)
    if order == "rows":
        return s_and_h + 4 * n * d + n + _ceil(n, size.rows) * 2 * n * d + d * d
    v = 2 * n * d + n
    return s_and_h + v + 2 * n * d + _ceil(n, size.columns) * (3 * n * d + 2 * n) + d * d


def flash_forward_words(n: int, d: int, words: int) -> int:
    """`flash_forward`: reads Q, writes O and l, and reads K and V for each block of rows."""
    check_sizes(n=n, d=d)
    return 2 * n * d + n + _ceil(n, forward_block(n, d, words)) * 2 * n * d


def flash1_backward_words(n: int, d: int, words: int) -> int:
    """`flash1_backward`: reads Q, O, dO and l, and reads and writes dQ, for each block of columns."""
    check_sizes(n=n, d=d)
    turns = _ceil(n, backward_block(n, d, words))
    return 4 * n * d + turns * (3 * n * d + n) + (2 * turns - 1) * n * d


def flash2_backward_words(n: int, d: int, words: int) -> int:
    """`flash2_backward`: computes v.

    Then reads Q, dO, l, v, and reads and writes dQ, for each column block.
    """
    check_sizes(n=n, d=d)
    turns = _ceil(n, backward_block(n, d, words))
    return 2 * n * d + n + 4 * n * d + turns * (2 * n * d + 2 * n) + (2 * turns - 1) * n * d


def flash_rows_words(n: int, d: int, words: int) -> int:
    """`flash_rows`: three products, and it reads A2 and h for each block of rows."""
    check_sizes(n=n, d=d)
    tile = largest_tile(words)
    products = 2 * product_words(n, d, d, tile) + product_words(d, d, n, tile)
    return products + 4 * n * d + n + _ceil(n, rows_block(n, d, words)) * 2 * n * d
