"""Random numbers by element, in torch: the same as csrc/include/monoidreduce/random.h, which says why these.

int64 arithmetic stands for unsigned: it wraps, and shifts to the right are masked.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["stream", "uniform", "uniform_16"]

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


def _word(stream: Tensor, paired: Tensor, other: Tensor) -> Tensor:
    """32 random bits, as int64. Indices `paired` that are 8 apart have the two words of one counter."""
    key, right, left = stream & _WORD, _shifted(stream, 32) ^ (other & _WORD), paired & (_WORD - 8)
    for _ in range(7):
        product = 0xD256D193 * left
        left, right = _shifted(product, 32) ^ key ^ right, product & _WORD
        key = (key + 0x9E3779B9) & _WORD
    return left.where((paired & 8) == 0, right)


def uniform(stream: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The number of an element, in (0, 1), as float32. row: the last leading index of the row."""
    return (2 * (_word(stream, column, row) >> 9) + 1).float() * 2.0**-24


def uniform_16(stream: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """A whole number of 16 bits of an element, as float32. row: as in `uniform`.

    Columns that are 8 apart have the halves of a word.
    """
    word = _word(stream, row, column & ~8)
    return (word >> 2 * (column & 8) & 0xFFFF).float()
