"""Random numbers by element, in torch: the same as csrc/include/monoidreduce/random.h, which says why these.

int64 arithmetic stands for unsigned: it wraps, and shifts to the right are masked.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["stream", "uniform"]

_WORD = 2**32 - 1


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def stream(seed: Tensor, leading: Tensor) -> Tensor:
    """A hash of a seed and of the number of a row's leading indices but the last, int64."""
    x = seed + _signed(0x9E3779B97F4A7C15) + leading * _signed(0xD1342543DE82EF95)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def uniform(stream: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The number of an element, in (0, 1), as float32. row: the last leading index of the row."""
    key, right, left = stream & _WORD, _shifted(stream, 32) ^ (row & _WORD), column & (_WORD - 8)
    for _ in range(7):
        product = 0xD256D193 * left
        left, right = _shifted(product, 32) ^ key ^ right, product & _WORD
        key = (key + 0x9E3779B9) & _WORD
    bits = left.where((column & 8) == 0, right) >> 9
    return (2 * bits + 1).float() * 2.0**-24
