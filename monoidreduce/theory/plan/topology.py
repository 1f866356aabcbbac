"""The physical mesh of a TPU pod (paper, Appendix B): its slices, and logical axes over it."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TypeAlias

from monoidreduce._validate import mismatch
from monoidreduce.theory.plan._positive import check_counts

__all__ = ["PODS", "V5P_CUBE", "V5P_POD", "Pod", "check_slice", "is_slice", "logical_strides"]

Pod: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # (shape of the pod, shape of the cubes of a slice)

V5P_POD = (16, 20, 28)
V5P_CUBE = (4, 4, 4)
PODS: dict[str, Pod] = {"v5p": (V5P_POD, V5P_CUBE)}  # by name of the hardware


def check_slice(
    shape: tuple[int, ...], pod: tuple[int, ...] = V5P_POD, cube: tuple[int, ...] = V5P_CUBE
) -> int:
    """The number of chips of a slice. A slice consists of whole cubes and fits into the pod (B.1).

    Raises ValueError for any other shape.
    """
    check_counts(**{f"shape[{axis}]": size for axis, size in enumerate(shape)})
    if len(shape) != len(pod) or any(
        size % edge or size > most for size, edge, most in zip(shape, cube, pod, strict=True)
    ):
        raise ValueError(mismatch("shape", f"multiples of {cube}, at most {pod}", shape))
    return prod(shape)


def is_slice(chips: int, pod: Pod) -> bool:
    """Whether this number of chips can be a slice of whole cubes, or lie within one cube (B.1)."""
    shape, cube = pod
    if chips <= prod(cube):
        return True
    edges = (range(edge, most + 1, edge) for edge, most in zip(cube, shape, strict=True))
    return any(prod(sizes) == chips for sizes in product(*edges))


def logical_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The distance, in chips, of neighbours along each logical axis, in row-major order (B.1).

    The last axis has stride 1: its chips are adjacent.
    """
    check_counts(**{f"sizes[{axis}]": size for axis, size in enumerate(sizes)})
    return tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
