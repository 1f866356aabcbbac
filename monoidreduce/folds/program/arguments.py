"""The signature of a user's function of one element, and the kinds of its data."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from functools import partial
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from monoidreduce._validate import is_dtensor
from monoidreduce.folds.program.errors import TraceError, user_line
from monoidreduce.folds.program.operations import DTYPES

__all__ = ["ARGUMENTS", "ROW_INDICES", "VECTOR", "arguments", "definition", "kind_of"]

ARGUMENTS = ("score", "other", "row", "column", "label", "head", "batch")
ROW_INDICES = ("row", "label", "head", "batch")
VECTOR = "vector of "  # with the width, the kind of a datum of rows with a second axis


def arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments with which a function is traced: those without a default."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TraceError(
                f"{function.__name__}: {parameter}: expected arguments that have names", definition(function)
            )
        if parameter.default is parameter.empty:
            names.append(parameter.name)
    return tuple(names)


def definition(function: Any) -> tuple[str, int]:
    """File and line of a function's `def`, below decorators; without Python code, the caller's line."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        return user_line()
    file, first = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = takewhile(bool, (linecache.getline(file, line) for line in count(first)))
    if next(lines, "").lstrip().startswith("@"):
        below = (line for line, text in enumerate(lines, first + 1) if text.lstrip().startswith("def "))
        return file, next(below, first)
    return file, first


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor's values in a program: "real", or the dtype's name for integers and bool.

    Raises:
        TypeError: programs do not support the dtype, or it is a DTensor, of which kernels see a part.
    """
    if type(tensor) is not Tensor and is_dtensor(tensor):
        placements = getattr(tensor, "placements", None)
        raise TypeError(
            f"expected a plain tensor, such as t.to_local(), got a DTensor with placements {placements}"
        )
    if tensor.dtype.is_floating_point:
        return "real"
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        instead = ": write t.to(torch.int64)" if tensor.dtype == torch.uint64 else ""
        raise TypeError(f"expected real numbers, or integers that int64 holds, got {tensor.dtype}{instead}")
    return name
