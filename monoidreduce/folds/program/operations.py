"""The scalar operations of a program: kinds, evaluation by torch, and derivatives.

The kind of a value is "real", "index" (a 64-bit integer, which wraps) or "bool". Comparisons with NaN are
False, as in torch. Lowered programs (`integers.lowered`) distinguish 32-bit integers from 64-bit ones, which
are of kind "wide". Leaves and operations of lowered programs are here too; traced functions do not have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monoidreduce.folds.program import streams

if TYPE_CHECKING:
    from monoidreduce.folds.program.graph import Expression

__all__ = ["DTYPES", "LEAVES", "OPERATIONS", "Operation", "Selected"]

# The ranges that integer data may have: a dtype's; an index of a row or column; such an index or -1 for none;
# the index of a sequence.
DTYPES: tuple[str, ...] = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
DTYPES += ("number", "number or none", "sequence")

# Kinds of the leaves. ("row", k) and the like are datum k of rows or of columns; integer data also have one
# of DTYPES. "batch", "head" and "query" are the indices of a row of attention; ("size", k) is size k of its
# call.
LEAVES = {
    "real": "real",  # a constant, as float.hex
    "integer": "index",
    "boolean": "bool",
    "score": "real",
    "other": "real",
    "third": "real",  # this and the next: what payloads add in backward to a function of two (payloads.py)
    "fourth": "real",
    "upstream": "real",  # gradients of the k largest in their columns, 0 elsewhere (torch/chunked.py)
    "position": "index",  # index of the column
    "row": "real",
    "column": "real",
    "row_index": "index",
    "column_index": "index",
    "batch": "index",
    "head": "index",
    "query": "index",
    "size": "index",
    "real_sum": "real",  # this and the following only in lowered programs
    "wide_integer": "wide",
    "wide_row_index": "wide",
    "wide_column_index": "wide",
}


@dataclass(frozen=True)
class Operation:
    """An operation. kinds: kinds of the arguments, then of the result. evaluate: the operation on torch
    tensors.

    pull: (gradient of the result, result, *arguments) -> gradients of the arguments, None for no gradient.
    """

    kinds: tuple[str, ...]
    evaluate: Callable[..., Any]
    pull: Callable[..., tuple[Expression | Selected | None, ...]] | None = None


class Selected(NamedTuple):
    """A gradient that applies if a condition holds (or does not); otherwise it is 0, even if not finite."""

    condition: Expression
    holds: bool
    gradient: Expression


def _unary(evaluate: Callable[..., Any], slope: Callable[..., Any]) -> Operation:
    """A real function of one argument. slope: its derivative, as a function of result and argument."""
    return Operation(("real", "real"), evaluate, lambda g, y, x: (g * slope(y, x),))


def _binary(evaluate: Callable[..., Any], pull: Callable[..., Any]) -> Operation:
    return Operation(("real", "real", "real"), evaluate, pull)


def _indices(evaluate: Callable[..., Any], result: str = "index") -> Operation:
    return Operation(("index", "index", result), evaluate)


def _quotient(x: Any, y: Any) -> Any:
    """The quotient, rounded down; 0 if y is 0.

    torch cannot divide by 0, nor -2^63 by -1, which wraps here.
    """
    whole = torch.div(x, torch.where((y == 0) | (y == -1), 1, y), rounding_mode="floor")
    return torch.where(y == 0, 0, torch.where(y == -1, -x, whole))


def _within(i: Any, size: Any) -> Any:
    """i as an index of an axis: negative values count from the end, and the result is clamped to the axis."""
    return torch.minimum(torch.where(i < 0, i + size, i).clamp(min=0), size - 1)


_INTEGERS: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (torch.add, "index"),
    "sub": (torch.sub, "index"),
    "mul": (torch.mul, "index"),
    "div": (_quotient, "index"),
    "mod": (lambda x, y: x - _quotient(x, y) * y, "index"),
    "and": (torch.bitwise_and, "index"),  # of bits, as the next one
    "or": (torch.bitwise_or, "index"),
    "lt": (torch.lt, "bool"),
    "le": (torch.le, "bool"),
    "eq": (torch.eq, "bool"),
    "stream": (streams.stream, "index"),  # of a seed and leading indices
}


def _same(x: Any) -> Any:
    return x


def _larger(g: Any, x: Any, y: Any) -> Selected:
    """The gradient of max(x, y) with respect to x: g if x is larger, half of it if they are equal."""
    return Selected(x < y, False, g.where(x == y, g * 0.5, g))


def _by_power(g: Any, z: Any, x: Any, y: Any) -> tuple[Any, Any]:
    by_base = g.where(y == 0.0, 0.0, g * (y * x ** (y - 1.0)))
    return by_base, g.where((x == 0.0) & (y >= 0.0), 0.0, g * (z * x.graph.apply("log", x)))


def _share(x: Any, high: Any, low: Any) -> Any:
    return torch.exp((x - torch.where(high == -math.inf, 0.0, high)) - low)


OPERATIONS: dict[str, Operation] = {
    "add": _binary(torch.add, lambda g, z, x, y: (g, g)),
    "sub": _binary(torch.sub, lambda g, z, x, y: (g, -g)),
    "mul": _binary(torch.mul, lambda g, z, x, y: (g * y, g * x)),
    "div": _binary(torch.div, lambda g, z, x, y: (g / y, -(g * z / y))),
    "maximum": _binary(torch.maximum, lambda g, z, x, y: (_larger(g, x, y), _larger(g, y, x))),
    "minimum": _binary(torch.minimum, lambda g, z, x, y: (_larger(g, y, x), _larger(g, x, y))),
    "neg": Operation(("real", "real"), torch.neg, lambda g, y, x: (-g,)),
    "abs": Operation(
        ("real", "real"), torch.abs, lambda g, y, x: (g.where(x > 0.0, g, g.where(x < 0.0, -g, 0.0)),)
    ),
    "exp": _unary(torch.exp, lambda y, x: y),
    "expm1": _unary(torch.expm1, lambda y, x: y + 1.0),
    "log": _unary(torch.log, lambda y, x: 1.0 / x),
    "log1p": _unary(torch.log1p, lambda y, x: 1.0 / (1.0 + x)),
    "sqrt": _unary(torch.sqrt, lambda y, x: 0.5 / y),
    "tanh": _unary(torch.tanh, lambda y, x: 1.0 - y * y),
    "erf": _unary(torch.erf, lambda y, x: (-(x * x)).exp() * (2 / math.sqrt(math.pi))),
    "sin": _unary(torch.sin, lambda y, x: x.graph.apply("cos", x)),
    "cos": _unary(torch.cos, lambda y, x: -x.graph.apply("sin", x)),
    "atan": _unary(torch.atan, lambda y, x: 1.0 / (1.0 + x * x)),
    "floor": Operation(("real", "real"), torch.floor),
    "round": Operation(("real", "real"), torch.round),  # half to even
    "pow": _binary(torch.pow, _by_power),
    "fmod": _binary(torch.fmod, lambda g, z, x, y: (g, -g * ((x - z) / y))),
    "sigmoid": _unary(torch.sigmoid, lambda y, x: y * (1.0 - y)),
    # log(1 + exp(x)), accurate everywhere
    "log1pexp": _unary(lambda x: torch.logaddexp(x, torch.zeros_like(x)), lambda y, x: x.sigmoid()),
    "detach": Operation(("real", "real"), torch.detach),  # the value, without a gradient
    "where": Operation(
        ("bool", "real", "real", "real"),
        torch.where,
        lambda g, z, c, x, y: (None, Selected(c, True, g), Selected(c, False, g)),
    ),
    # softmax probability exp(x - high - low), where high + low is a log-sum-exp in two words; -inf counts as
    # 0
    "share": Operation(("real", "real", "real", "real"), _share),
    "lt": Operation(("real", "real", "bool"), torch.lt),
    "le": Operation(("real", "real", "bool"), torch.le),
    "eq": Operation(("real", "real", "bool"), torch.eq),
    "and": Operation(("bool", "bool", "bool"), torch.logical_and),
    "or": Operation(("bool", "bool", "bool"), torch.logical_or),
    "not": Operation(("bool", "bool"), torch.logical_not),
    "to_real": Operation(("index", "real"), _same),  # the reader converts the dtype
    **{f"index_{name}": _indices(*of) for name, of in _INTEGERS.items()},
    "index_where": Operation(("bool", "index", "index", "index"), torch.where),
    # a random number in (0, 1), of a stream, a row and a column
    "uniform": Operation(
        ("index", "index", "index", "real"), streams.uniform
    ),  # the reader converts the dtype
    "uniform_16": Operation(("index", "index", "index", "real"), streams.uniform_16),  # of 0, 1, ..., 65535
    # assertions about the range of an integer
    **{f"as_{dtype}": Operation(("index", "index"), _same) for dtype in DTYPES},
    # Index of a captured tensor: the index along one axis, the row-major index, and the place in the table.
    "within": _indices(_within),
    "table_line": Operation(("index",) * 4, lambda at, size, i: at * size + i),
    "table_place": _indices(torch.add),
    # entries of the call's tables of reals and of integers; the reader passes the tables
    "gather": Operation(("index", "real"), torch.take),
    "index_gather": Operation(("index", "index"), torch.take),
    # only in lowered programs
    "within_from_0": _indices(_within),
    "widen": Operation(("index", "wide"), _same),
    **{
        f"wide_{name}": Operation(("wide", "wide", result.replace("index", "wide")), evaluate)
        for name, (evaluate, result) in _INTEGERS.items()
    },
    "wide_where": Operation(("bool", "wide", "wide", "wide"), torch.where),
    "wide_to_real": Operation(("wide", "real"), _same),
    "wide_uniform": Operation(("wide", "index", "index", "real"), streams.uniform),
    "wide_uniform_16": Operation(("wide", "index", "index", "real"), streams.uniform_16),
    "is_below": Operation(
        ("wide", "index", "index", "real", "bool"),
        lambda stream, row, column, limit: streams.uniform_16(stream, row, column) < limit,
    ),
    "wide_within": Operation(("wide", "index", "index"), _within),
    "wide_gather": Operation(("index", "wide"), torch.take),
}
