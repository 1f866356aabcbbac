"""Bounds on I/O in words: the paper's asymptotic ones, and explicit ones.

An asymptotic bound is a theorem's expression with every constant set to 1. It says how I/O grows with n, d
and M, but is not a number of words that every algorithm must move; the explicit bounds are. A word is one
element.

n must be an int of 0 or more, d and M ints of 1 or more. Every function raises ValueError for smaller values,
and TypeError for anything but an int.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from monoidreduce._validate import check_choice

from .two_level import check_least, check_sizes

__all__ = [
    "Bound",
    "compulsory",
    "dividing_point",
    "large_cache_theta",
    "lower_bounds",
    "matmul",
    "nonzeros",
    "regime",
    "segment",
    "small_cache_theta",
    "sparse_theta",
    "sparse_theta_informal",
    "theta",
    "theta_forward",
]

Problem = Literal["g", "O", "dQ, dK, dV"]


def _check(n: int, d: int, words: int) -> None:
    check_least("n", n, 0)
    check_sizes(d=d, words=words)


@dataclass(frozen=True)
class Bound:
    """A bound on I/O.

    Attributes:
        name: name of the function that computed it.
        words: its value.
        asymptotic: whether it holds only up to a constant factor.
    """

    name: str
    words: float
    asymptotic: bool


def regime(d: int, words: int) -> Literal["small", "large"]:
    """The paper's two scenarios: a small cache has M < d^2 (section 1.1)."""
    check_sizes(d=d, words=words)
    return "small" if words < d * d else "large"


def large_cache_theta(n: int, d: int, words: int) -> Bound:
    """(n^2 d^2 + n d^3) / M: Theorems 4.1 and 4.2 (D.5, E.9), for M >= d^2.

    FlashAttention's curve in figure 1.
    """
    _check(n, d, words)
    return Bound("large_cache_theta", (n**2 * d**2 + n * d**3) / words, asymptotic=True)


def small_cache_theta(n: int, d: int, words: int) -> Bound:
    """(n^2 d + n d^2) / sqrt(M): Theorems 4.3 and 4.4 (C.12, E.10), for M < d^2."""
    _check(n, d, words)
    return Bound("small_cache_theta", (n**2 * d + n * d**2) / math.sqrt(words), asymptotic=True)


def theta(n: int, d: int, words: int) -> Bound:
    """Theorem 1.1, the I/O of the gradient g: the smaller of the two above. At M = d^2 both are n^2 + n d."""
    least = min(large_cache_theta(n, d, words).words, small_cache_theta(n, d, words).words)
    return Bound("theta", least, asymptotic=True)


def theta_forward(n: int, d: int, words: int) -> Bound:
    """Table 1, the I/O of the forward pass: min{n^2 d^2 / M, n^2 d / sqrt(M)}."""
    _check(n, d, words)
    return Bound("theta_forward", min(n**2 * d**2 / words, n**2 * d / math.sqrt(words)), asymptotic=True)


def nonzeros(a1: Tensor, x: Tensor, a2: Tensor) -> tuple[int, int, int, int]:
    """Z_A, Z_X, Z_AX and Z_AXA of Theorem 4.5, counted in A1 [n, d], X [d, d] and A2 [n, d]."""

    def count(matrix: Tensor) -> int:
        return int(torch.count_nonzero(matrix))

    return min(count(a1), count(a2)), count(x), min(count(a1 @ x), count(x @ a2.T)), count(a1 @ x @ a2.T)


def sparse_theta(
    z_a: int, z_x: int, z_ax: int, z_axa: int, words: int, *, form: Literal["as_stated", "safe"] = "as_stated"
) -> Bound:
    """Theorem 4.5 (Lemma F.2, Theorems F.3 and F.4), for sparse inputs, forward and backward.

    Args:
        z_a, z_x, z_ax, z_axa: numbers of nonzero entries, see `nonzeros`.
        words: M.
        form: "as_stated": the minimum over both regimes of the sum over both products. "safe": the sum over
            both products of their minima, which is what Lemma F.1 proves; "as_stated" may be larger.

    Raises:
        ValueError: `form` is neither, or a number of entries is below 0.
    """
    for name, count in {"z_a": z_a, "z_x": z_x, "z_ax": z_ax, "z_axa": z_axa}.items():
        check_least(name, count, 0)
    check_sizes(words=words)
    check_choice("form", form, ("as_stated", "safe"))
    root = math.sqrt(words)
    if form == "as_stated":
        large = (z_a**2 + z_a * z_x) / words
        small = (z_a * math.sqrt(z_axa) + math.sqrt(z_a * z_x * z_ax)) / root
        return Bound("sparse_theta", min(large, small), asymptotic=True)
    products = ((z_a + z_x, z_ax), (z_ax + z_a, z_axa))  # R_1 and R_2 of Lemma F.1
    least = (min(r1**2 / words, r1 * math.sqrt(r2) / root) for r1, r2 in products)
    return Bound("sparse_theta", sum(least), asymptotic=True)


def sparse_theta_informal(z_input: int, z_qk: int, words: int) -> Bound:
    """Theorem 1.2: min{Z_input^2 / M, Z_input sqrt(Z_QK) / sqrt(M)}."""
    check_least("z_input", z_input, 0)
    check_least("z_qk", z_qk, 0)
    check_sizes(words=words)
    least = min(z_input**2 / words, z_input * math.sqrt(z_qk) / math.sqrt(words))
    return Bound("sparse_theta_informal", least, asymptotic=True)


def dividing_point(z_a: int, z_x: int, z_ax: int, z_axa: int) -> float:
    """The M at which both regimes of Theorem 4.5 are equal (Remark 4.7): d^2 for dense inputs.

    The remark prints sqrt(Z_A Z_X) Z_AX; the proof of Lemma F.2 has sqrt(Z_A Z_X Z_AX), which is used here.
    Each number of entries must be 1 or more.
    """
    check_sizes(z_a=z_a, z_x=z_x, z_ax=z_ax, z_axa=z_axa)
    return ((z_a**2 + z_a * z_x) / (z_a * math.sqrt(z_axa) + math.sqrt(z_a * z_x * z_ax))) ** 2


def compulsory(n: int, d: int, problem: Problem = "g") -> Bound:
    """Reading every input once and writing every result once, from an empty cache.

    g needs A1, A2, A3, dO, X and Y: 4 n d + 3 d^2 words with the result. O and l need Q, K and V: 4 n d + n.
    dQ, dK and dV need Q, K, V and dO: 7 n d.

    Raises:
        ValueError: `problem` is none of these.
    """
    check_least("n", n, 0)
    check_sizes(d=d)
    words = {"g": 4 * n * d + 3 * d * d, "O": 4 * n * d + n, "dQ, dK, dV": 7 * n * d}
    check_choice("problem", problem, tuple(words))
    return Bound("compulsory", words[problem], asymptotic=False)


def segment(n: int, d: int, words: int, pairs: int | None = None) -> Bound:
    """M floor(n^2 d / (M^2 / d + M^(3/2))), for one product Q K^T, computed once from Q and K in memory.

    Proof: cut a run into segments of M transfers. A segment sees at most 2 M entries of Q and K: M that are
    in the cache when it begins, and M that it reads. Entries of the product whose d multiplications all lie
    in the segment need a whole row of Q and of K each. So there are at most (M / d)^2 of them, with M^2 / d
    multiplications. Every other entry that the segment works on has a partial sum, which is in the cache when
    the segment begins or ends, or is transferred. With the entries of Q and K these are at most 3 M words,
    which by the Loomis-Whitney inequality take part in at most M^(3/2) multiplications. So n^2 d
    multiplications need that many full segments.

    Both regimes of Theorem 1.1 follow, with a constant: n^2 d^2 / M far above M = d^2, and n^2 d / sqrt(M)
    far below. At M = d^2 the bound is n^2 / 2.

    Args:
        n, d: rows and columns of Q and K.
        words: M.
        pairs: number of entries of the product that are computed, if a mask excludes some (default: n^2).
    """
    _check(n, d, words)
    if pairs is not None:
        check_least("pairs", pairs, 0)
    multiplications = (n * n if pairs is None else pairs) * d
    return Bound(
        "segment", words * math.floor(multiplications / (words**2 / d + words**1.5)), asymptotic=False
    )


def matmul(rows: int, columns: int, depth: int, words: int) -> Bound:
    """2 m n k / sqrt(M) - 2 M, for a single matrix product: Lemma E.8 with an explicit constant.

    The constant is that of Smith, Lowery, Langou and van de Geijn, A Tight I/O Lower Bound for Matrix
    Multiplication, arXiv:1702.02017.
    """
    for name, size in {"rows": rows, "columns": columns, "depth": depth}.items():
        check_least(name, size, 0)
    check_sizes(words=words)
    return Bound("matmul", 2 * rows * columns * depth / math.sqrt(words) - 2 * words, asymptotic=False)


def lower_bounds(n: int, d: int, words: int) -> tuple[Bound, ...]:
    """The bounds for the gradient g: `theta`, `segment` and `compulsory`."""
    return theta(n, d, words), segment(n, d, words), compulsory(n, d)
