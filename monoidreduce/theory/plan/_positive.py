"""Argument checks that the formulas share. Each raises TypeError or ValueError that names the argument."""

from __future__ import annotations

from monoidreduce._validate import check_finite, check_int, check_positive, mismatch

__all__ = ["check_amounts", "check_counts", "check_numbers"]


def check_numbers(**values: float) -> None:
    """Raise unless each value is a finite number above 0."""
    for name, value in values.items():
        check_positive(name, value)


def check_amounts(**values: float) -> None:
    """Raise unless each value is a finite number, 0 or above."""
    for name, value in values.items():
        if check_finite(name, value, "a finite number >= 0") < 0:
            raise ValueError(mismatch(name, "a finite number >= 0", value))


def check_counts(**values: int) -> None:
    """Raise unless each value is an int of 1 or more."""
    for name, value in values.items():
        if check_int(name, value, "an int >= 1") < 1:
            raise ValueError(mismatch(name, "an int >= 1", value))
