"""The scalar operations of a program: kinds, values by torch, and derivatives.

A value is "real", "index" (an integer of 64 bits, which wraps) or "bool". Comparisons of reals with NaN are
False, as in torch. For engines `integers.lowered` tells integers of 32 bits from those of 64, which it calls
"wide": their leaves and operations are here too, and no traced function has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from monoidreduce.folds.program.graph import Expression

__all__ = ["DTYPES", "LEAVES", "OPERATIONS", "SAME", "Operation", "Selected"]

# What integers of data may be: of a dtype; the number of a row or column; that, or -1 for none; the number of
# a sequence.
DTYPES: tuple[str, ...] = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
DTYPES += ("number", "number or none", "sequence")

# Leaves: their kind. ("row", k) and the like are number k of the data of rows or of columns; integers also
# have one of DTYPES. "batch", "head" and "query" are the numbers of a row of attention, ("size", k) number k
# of its call.
LEAVES = {
    "real": "real",  # a constant, as float.hex
    "integer": "index",
    "boolean": "bool",
    "score": "real",
    "other": "real",
    "position": "index",  # the column's number
    "row": "real",
    "column": "real",
    "row_index": "index",
    "column_index": "index",
    "batch": "index",
    "head": "index",
    "query": "index",
    "size": "index",
    "real_sum": "real",  # of lowered programs, as is what follows
    "wide_integer": "wide",
    "wide_row_index": "wide",
    "wide_column_index": "wide",
}

# Operations that return their last argument. They matter to derivatives alone: no code is generated for them.
SAME = {"detach", "counted"}


@dataclass(frozen=True)
class Operation:
    """kinds: of the arguments, and last of the result. evaluate: by torch, on tensors.

    pull: from the gradient of the result, the result and the arguments, the gradients of the arguments; None
    where there is none.
    """

    kinds: tuple[str, ...]
    evaluate: Callable[..., Any]
    pull: Callable[..., tuple[Expression | Selected | None, ...]] | None = None


class Selected(NamedTuple):
    """A gradient where a condition holds, or does not hold; elsewhere it is 0, also of what is not finite."""

    condition: Expression
    holds: bool
    gradient: Expression


def _unary(evaluate: Callable[..., Any], slope: Callable[..., Any]) -> Operation:
    """slope: the derivative, of the result and the argument."""
    return Operation(("real", "real"), evaluate, lambda g, y, x: (g * slope(y, x),))


def _binary(evaluate: Callable[..., Any], pull: Callable[..., Any]) -> Operation:
    return Operation(("real", "real", "real"), evaluate, pull)


def _indices(evaluate: Callable[..., Any], result: str = "index") -> Operation:
    return Operation(("index", "index", result), evaluate)


def _quotient(x: Any, y: Any) -> Any:
    """Rounded down; 0 where y is 0. -2^63 / -1, which wraps, and 0 are more than torch divides by."""
    whole = torch.div(x, torch.where((y == 0) | (y == -1), 1, y), rounding_mode="floor")
    return torch.where(y == 0, 0, torch.where(y == -1, -x, whole))


def _within(i: Any, size: Any) -> Any:
    """The index of an axis that is nearest to i, where negative ones count from the end."""
    return torch.minimum(torch.where(i < 0, i + size, i).clamp(min=0), size - 1)


_INTEGERS: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (torch.add, "index"),
    "sub": (torch.sub, "index"),
    "mul": (torch.mul, "index"),
    "div": (_quotient, "index"),
    "mod": (lambda x, y: x - _quotient(x, y) * y, "index"),
    "lt": (torch.lt, "bool"),
    "le": (torch.le, "bool"),
    "eq": (torch.eq, "bool"),
}


def _same(x: Any) -> Any:
    return x


def _larger(g: Any, x: Any, y: Any) -> Selected:
    """The gradient of the larger of two by the first: all, or half where they are equal."""
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
    # the value; where the condition does not hold, without a gradient
    "counted": Operation(
        ("bool", "real", "real"),
        lambda c, x: torch.where(c, x, x.detach()),
        lambda g, y, c, x: (None, Selected(c, True, g)),
    ),
    "where": Operation(
        ("bool", "real", "real", "real"),
        torch.where,
        lambda g, z, c, x, y: (None, Selected(c, True, g), Selected(c, False, g)),
    ),
    # exp(x - high - low), where high + low is a log-sum-exp in two words; measured from 0 where that is -inf
    "share": Operation(("real", "real", "real", "real"), _share),
    "lt": Operation(("real", "real", "bool"), torch.lt),
    "le": Operation(("real", "real", "bool"), torch.le),
    "eq": Operation(("real", "real", "bool"), torch.eq),
    "and": Operation(("bool", "bool", "bool"), torch.logical_and),
    "or": Operation(("bool", "bool", "bool"), torch.logical_or),
    "not": Operation(("bool", "bool"), torch.logical_not),
    "to_real": Operation(("index", "real"), _same),  # the reader converts
    **{f"index_{name}": _indices(*of) for name, of in _INTEGERS.items()},
    "index_where": Operation(("bool", "index", "index", "index"), torch.where),
    # what is known of an integer
    **{f"as_{dtype}": Operation(("index", "index"), _same) for dtype in DTYPES},
    # An index of a tensor of several axes: along each axis, line by line, and in the table that has it.
    "within": _indices(_within),
    "table_line": Operation(("index",) * 4, lambda at, size, i: at * size + i),
    "table_place": _indices(torch.add),
    # element of the call's table of reals, of integers; the reader knows these
    "gather": Operation(("index", "real"), torch.take),
    "index_gather": Operation(("index", "index"), torch.take),
    # of lowered programs
    "within_from_0": _indices(_within),
    "widen": Operation(("index", "wide"), _same),
    **{
        f"wide_{name}": Operation(("wide", "wide", result.replace("index", "wide")), evaluate)
        for name, (evaluate, result) in _INTEGERS.items()
    },
    "wide_where": Operation(("bool", "wide", "wide", "wide"), torch.where),
    "wide_to_real": Operation(("wide", "real"), _same),
    "wide_within": Operation(("wide", "index", "index"), _within),
    "wide_gather": Operation(("index", "wide"), torch.take),
}
