"""Statistics of programs: one op for all of them, which carries the program as text.

What programs are is imported with the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from monoidreduce._ops.registry import UNROUNDED, register


def in_module(module: str) -> Callable[[str], Callable[..., Any]]:
    """Of a name, the function that has it in a module."""

    def function(name: str) -> Callable[..., Any]:
        found = lru_cache(1)(lambda: getattr(import_module(module), name))

        def call(*args: Any) -> Any:
            return found()(*args)

        return call

    return function


_in_passes = in_module("monoidreduce.folds.statistics_op")


register(
    "statistics",
    inputs="Tensor a, Tensor b, Tensor? other_a, Tensor? other_b, Tensor? row, Tensor? column, "
    "Tensor? row_index, Tensor? column_index",
    options="str program, float scale, int? workspace",
    outputs="values, low, indices",
    differentiable="values",
    residuals="values, low, indices",
    constants="row_index, column_index",
    forward=_in_passes("forward"),
    fake=_in_passes("results"),
    backward=_in_passes("backward"),
    backward_options=UNROUNDED,
)
