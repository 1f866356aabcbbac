"""Sums of float32 numbers that have the same bits in any order: of integers, each a multiple of a unit.

The unit of a sum is a power of 2. It follows from the largest addend and the number of addends, so that the
sum of integers fits in 64 bits. Rounding to a multiple of the unit changes an addend by at most
2 ** -60 * addends times the largest one: up to 2 ** 35 addends that is less than float32 rounds the largest
one by. Units are at least 2 ** -127, so what is below float32's normal numbers is lost. Integers are added
exactly, and their sum is rounded to float32 at the end. If addends cancel to 0 in the run that finds the
largest, but not in the run that adds, the rest may be lost. It is of the size of their rounding errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["factors_of", "sums_of"]

_BIAS, _FRACTION = 127, 23  # of float32: the exponent of 1, and the bits below exponents
_MOST = 61  # bits of the largest sum: two less than fit, as the addends of two kernels may differ a little
_NOT_FINITE = 255  # the exponent


def factors_of(largest: Tensor, addends: int) -> Tensor:
    """The factors of addends before they are rounded to integers: 1 / unit of each sum; 0 for no integers.

    largest: float32, of the absolute addends of each sum. If it is NaN or infinite, there are no integers.
    addends: at most so many in each sum.
    """
    exponent = largest.view(torch.int32) >> _FRACTION  # the largest is less than 2 ** (exponent - _BIAS + 1)
    of_factor = _BIAS + _MOST - (addends - 1).bit_length() - (exponent - _BIAS + 1)
    factor = of_factor.clamp(max=2 * _BIAS) << _FRACTION
    return factor.masked_fill(exponent == _NOT_FINITE, 0).view(torch.float32)


def sums_of(integers: Tensor, factors: Tensor) -> Tensor:
    """The sums in float32. factors: of `factors_of`.

    integers: int64. For no integers, the first half has the float32 sum of the addends that are not finite.
    """
    not_finite = integers.view(torch.float32).view(-1, 2)[:, 0]
    return torch.where(factors == 0, not_finite, integers.double().div_(factors).float())
