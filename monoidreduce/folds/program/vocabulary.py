"""The torch functions and methods that traced functions may use, in terms of expressions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from monoidreduce.folds.program.chance import OUTSIDE, draws
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.graph import Expression, Part

__all__ = ["call", "method"]


def _one_beside(x: Expression) -> Expression | None:
    """If x is 1 + y or 1 - z: y, or y = -z. Otherwise None."""
    name, *args = x.graph.nodes[x.number]
    if name not in ("add", "sub"):
        return None
    left, right = (Expression(x.graph, number) for number in args)
    if left.constant == 1:
        return right if name == "add" else -right
    return left if right.constant == 1 and name == "add" else None


def _log1p(x: Any) -> Any:
    name, *args = x.graph.nodes[x.number]
    return x.graph.apply("log1pexp", Expression(x.graph, args[0])) if name == "exp" else _apply("log1p", x)


def _log(x: Any) -> Any:
    beside_one = _one_beside(x)
    return _apply("log", x) if beside_one is None else _log1p(beside_one)


def _apply(name: str, x: Any) -> Any:
    return x.graph.apply(name, x.graph.real(x))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = x.where(x < min, min, x)
    return x if max is None else x.where(x > max, max, x)


def _relu(x: Any) -> Any:
    return x.where(x <= 0, 0 if x.kind == "index" else 0.0, x)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x.graph.real(x) * beta
    return x.where(scaled > threshold, x, x.graph.apply("log1pexp", scaled) / beta)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + _apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if approximate != "none":
        raise TraceError(f"gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    return 0.5 * x * (1.0 + _apply("erf", x * math.sqrt(0.5)))


def _larger(name: str, x: Any, y: Any) -> Any:
    graph = x.graph
    y = graph.expression(y)
    if x.kind == y.kind == "index":
        return x.where(x < y if name == "minimum" else y < x, x, y)
    return graph.apply(name, graph.real(x), graph.real(y))


def _floor_or_quotient(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return x // y
    raise TraceError(f"div: rounding_mode: expected None or 'floor', got {rounding_mode!r}")


def _floor(x: Any) -> Any:
    """floor(x). For a quotient of integers it is integer division, because kernels divide by a reciprocal."""
    name, *args = x.graph.nodes[x.number]
    if name == "div":
        integers = [_integer(Expression(x.graph, number)) for number in args]
        if all(x is not None for x in integers):
            return x.graph.real(integers[0] // integers[1])
    return _whole("floor", x)


def _integer(x: Any) -> Any:
    """The integer expression from which a real was converted, or its value if it is a whole constant.

    Else None.
    """
    name, *args = x.graph.nodes[x.number]
    if name == "to_real":
        return Expression(x.graph, args[0])
    whole = name == "real" and x.constant.is_integer() and abs(x.constant) < 2**31 and x.constant != 0
    return x.graph.constant(int(x.constant)) if whole else None


def _holds(x: Any) -> Any:
    """A condition; of a number, whether it is not 0."""
    return x if x.kind == "bool" else x != 0


def _whole(name: str, x: Any) -> Any:
    return x if x.kind == "index" else _apply(name, x)


def _round(x: Any, *, decimals: int = 0) -> Any:
    if decimals != 0:
        raise TraceError(
            f"round: decimals: expected 0, got {decimals!r}: write torch.round(x * 10**n) / 10**n"
        )
    return _whole("round", x)


def _trunc(x: Any) -> Any:
    return x if x.kind == "index" else x.where(x < 0.0, -_floor(-x), _floor(x))


def _fmod(x: Any, y: Any) -> Any:
    y = x.graph.expression(y)
    if x.kind == y.kind == "index":
        rest = x % y
        return x.where((rest != 0) & ((x < 0) ^ (y < 0)), rest - y, rest)
    return x.graph.apply("fmod", x.graph.real(x), x.graph.real(y))


def _logaddexp(x: Any, y: Any) -> Any:
    graph = x.graph
    x, y = graph.real(x), graph.real(y)
    apart = x.where(x == y, 0.0, abs(x - y))  # 0 for equal infinities too
    return _larger("maximum", x, y) + graph.apply("log1pexp", -apart)


def _elu(x: Any, alpha: float = 1.0) -> Any:
    return x.where(x > 0.0, x, alpha * _apply("expm1", x))


def _acos(x: Any) -> Any:
    x = x.graph.real(x)
    return 2.0 * _apply("atan", _apply("sqrt", (1.0 - x) / (1.0 + x)))


def _asin(x: Any) -> Any:
    x = x.graph.real(x)
    return 2.0 * _apply("atan", x / (1.0 + _apply("sqrt", (1.0 - x) * (1.0 + x))))


def _acosh(x: Any) -> Any:
    above = x.graph.real(x) - 1.0
    return _apply("log1p", above + _apply("sqrt", above) * _apply("sqrt", above + 2.0))


def _asinh(x: Any) -> Any:
    x = x.graph.real(x)
    size = x.where(x < 0.0, -x, x)  # abs has no derivative at 0
    near = x.where(size < 1e8, size, 0.0)
    of_near = _apply("log1p", near + near * near / (1.0 + _apply("sqrt", 1.0 + near * near)))
    result = x.where(size < 1e8, of_near, _apply("log", size) + math.log(2))
    return x.where(x < 0.0, -result, result)


def _between(x: Any, least: float, most: float, low: Any, middle: Any, high: Any) -> Any:
    """A piecewise function: low, middle, high.

    At the kinks derivatives are those of low and high, as in torch.
    """
    return x.where(x <= least, low, x.where(x >= most, high, middle))


def _like(x: Any, value: Any) -> Any:
    return x.graph.expression(value)


def _scaled_sum(x: Any, y: Any, alpha: float = 1) -> Any:
    return x + y if alpha == 1 else x + y * alpha


def _as_real(x: Any, *dtype: Any, **options: Any) -> Any:
    return x.where(x, 1.0, 0.0) if x.kind == "bool" else x.graph.real(x)


def _to(x: Any, dtype: Any = None, *rest: Any, **options: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise TraceError("to: expected a dtype")
    if dtype.is_floating_point:
        return _as_real(x)
    if dtype == torch.bool:
        return x if x.kind == "bool" else x != 0
    return _as_integer(dtype, x)


def _as_integer(dtype: torch.dtype, x: Any, *_: Any, **options: Any) -> Any:
    """Conversion to an integer dtype: the value wraps to the dtype's range, and is held in 64 bits."""
    if x.kind == "real":
        raise TraceError("a real number to an integer: there is no rounding in kernel code")
    if x.kind == "bool":
        return x.where(x, 1, 0)
    of = torch.iinfo(dtype)
    if of.bits == 64:
        if of.min == 0:
            raise TraceError("torch.uint64: integers are int64")
        return x
    return (x - of.min) % (1 << of.bits) + of.min


def _sign(x: Any) -> Any:
    one = 1 if x.kind == "index" else 1.0
    return x.where(x > 0, one, x.where(x < 0, -one, 0 * one))


def _filled(value: int, x: Any, size: Any = (), dtype: Any = None, **options: Any) -> Any:
    if tuple(size) != ():
        raise TraceError(
            f"a tensor of shape {list(size)}: a value of one element is a single number, of size ()"
        )
    return x.graph.constant(bool(value) if dtype == torch.bool else value)


_SELU = 1.0507009873554805  # torch's scale

# Builders by name of torch's function or method. The first argument is an expression.
BUILDERS: dict[str, Callable[..., Any]] = {
    **{name: partial(_apply, name) for name in ("exp", "expm1", "sqrt", "tanh", "erf", "sigmoid")},
    **{name: partial(_apply, name) for name in ("sin", "cos", "atan")},
    "acos": _acos,
    "acosh": _acosh,
    "asin": _asin,
    "asinh": _asinh,
    "atanh": lambda x: 0.5 * (_apply("log1p", x) - _apply("log1p", -x)),
    "ceil": lambda x: x if x.kind == "index" else -_floor(-x.graph.real(x)),
    "celu": lambda x, alpha=1.0: x.where(x > 0.0, x, alpha * _apply("expm1", x / alpha)),
    "cosh": lambda x: 0.5 * (x.exp() + (-x).exp()),
    "elu": _elu,
    "erfc": lambda x: 1.0 - _apply("erf", x),
    "floor": _floor,
    "fmod": _fmod,
    "frac": lambda x: x - _trunc(x),
    "full_like": lambda x, value: _like(x, value),
    "hardsigmoid": lambda x: _between(x, -3.0, 3.0, 0.0, x / 6.0 + 0.5, 1.0),
    "hardswish": lambda x: _between(x, -3.0, 3.0, 0.0, x * (x / 6.0 + 0.5), x),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: _between(x, min_val, max_val, min_val, x, max_val),
    "hypot": lambda x, y: _apply("sqrt", x * x + y * y),
    "isfinite": lambda x: abs(x.graph.real(x)) < math.inf,
    "isinf": lambda x: abs(x.graph.real(x)) == math.inf,
    "isnan": lambda x: x.graph.real(x) != x.graph.real(x),
    "leaky_relu": lambda x, negative_slope=0.01: x.where(x > 0.0, x, x * negative_slope),
    "lerp": lambda x, end, weight: x + weight * (end - x),
    "log10": lambda x: _log(x) / math.log(10),
    "logaddexp": _logaddexp,
    "logaddexp2": lambda x, y: _logaddexp(x * math.log(2), y * math.log(2)) / math.log(2),
    "masked_fill": lambda x, mask, value: x.where(mask, value, x),
    "mish": lambda x: x * _apply("tanh", _softplus(x)),
    "ones_like": lambda x: _like(x, 1.0 if x.kind == "real" else 1),
    "relu6": lambda x: _between(x, 0.0, 6.0, 0.0, x, 6.0),
    "round": _round,
    "selu": lambda x: _SELU * _elu(x, 1.6732632423543772),
    "sinh": lambda x: 0.5 * (_apply("expm1", x) - _apply("expm1", -x)),
    "softsign": lambda x: x / (1.0 + abs(x)),
    "tan": lambda x: _apply("sin", x) / _apply("cos", x),
    "tanhshrink": lambda x: x - _apply("tanh", x),
    "trunc": _trunc,
    "xlogy": lambda x, y: x.where((x == 0) & (y == y), 0.0, x * _log(x.graph.real(y))),
    "zeros_like": lambda x: _like(x, 0.0 if x.kind == "real" else 0),
    "abs": lambda x: abs(x),
    "add": _scaled_sum,
    "bitwise_and": lambda x, y: x & y,
    "bitwise_left_shift": lambda x, bits: x << bits,
    "bitwise_not": lambda x: ~x,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_right_shift": lambda x, bits: x >> bits,
    "bitwise_xor": lambda x, y: x ^ y,
    "bool": lambda x: _to(x, torch.bool),
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clamp_min": lambda x, min: _clamp(x, min),
    "div": _floor_or_quotient,
    "double": _as_real,
    "eq": lambda x, y: x == y,
    "exp2": lambda x: (x * math.log(2)).exp(),
    "float": _as_real,
    "floor_divide": lambda x, y: x // y,
    "ge": lambda x, y: x >= y,
    "gelu": _gelu,
    "gt": lambda x, y: x > y,
    "int": partial(_as_integer, torch.int32),
    "le": lambda x, y: x <= y,
    "log": _log,
    "log1p": _log1p,
    "log2": lambda x: _log(x) / math.log(2),
    "logical_and": lambda x, y: _holds(x) & _holds(x.graph.expression(y)),
    "logical_not": lambda x: ~_holds(x),
    "logical_or": lambda x, y: _holds(x) | _holds(x.graph.expression(y)),
    "logical_xor": lambda x, y: _holds(x) ^ _holds(x.graph.expression(y)),
    "logsigmoid": lambda x: -x.graph.apply("log1pexp", -x.graph.real(x)),
    "long": partial(_as_integer, torch.int64),
    "detach": partial(_apply, "detach"),
    "lt": lambda x, y: x < y,
    "maximum": partial(_larger, "maximum"),
    "minimum": partial(_larger, "minimum"),
    "mul": lambda x, y: x * y,
    "ne": lambda x, y: x != y,
    "neg": lambda x: -x,
    "pow": lambda x, y: x**y,
    "reciprocal": lambda x: 1.0 / x,
    "relu": _relu,
    "remainder": lambda x, y: x % y,
    "rsqrt": lambda x: 1.0 / _apply("sqrt", x),
    "sign": _sign,
    "silu": lambda x: x * x.sigmoid(),
    "softplus": _softplus,
    "square": lambda x: x * x,
    "sub": lambda x, y, alpha=1: x - (y if alpha == 1 else y * alpha),
    "to": _to,
    "where": lambda condition, x, y: condition.where(condition, x, y),
}
OTHER_NAMES = {
    "__and__": "bitwise_and",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctanh": "atanh",
    "fix": "trunc",
    "clip": "clamp",
    "divide": "div",
    "expit": "sigmoid",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "sgn": "sign",
    "subtract": "sub",
    "true_divide": "div",
}
METHODS = {**BUILDERS, **{other: BUILDERS[name] for other, name in OTHER_NAMES.items()}}
METHODS |= {"new_ones": partial(_filled, 1), "new_zeros": partial(_filled, 0)}  # torch's masks use them
FUNCTIONS = {
    getattr(owner, name): builder
    for owner in (torch, Tensor, F, torch.special)
    for name, builder in METHODS.items()
    if hasattr(owner, name)
}


# Statistics to use instead of torch's reductions, for errors.
STATISTICS = {
    **dict.fromkeys(("max", "amax", "argmax"), "largest(x), and the larger one of two numbers torch.maximum"),
    **dict.fromkeys(
        ("min", "amin", "argmin"), "smallest(x), and the smaller one of two numbers torch.minimum"
    ),
    **dict.fromkeys(("softmax", "log_softmax"), "softmax(x), with a logsumexp and a mean(f)"),
    "logsumexp": "softmax(x).logsumexp",
    "mean": "softmax(log_weight).mean(x)",
    "sum": "total(x)",
}


def _over_columns(name: str) -> str:
    if name not in STATISTICS:
        return ""
    return f", as a function sees one element: over the columns it is mr.stat.{STATISTICS[name]}"


def method(of: Expression, name: str) -> Callable[..., Any]:
    if draws(getattr(Tensor, name, None)):
        raise TraceError(f"{name}: {OUTSIDE}")
    if name not in METHODS:
        listed = ", ".join(sorted(known for known in METHODS if known[0] != "_"))
        raise TraceError(f"a value of one element has no .{name}{_over_columns(name)}; it has {listed}")
    return partial(_build, name, METHODS[name], of)


def call(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The expression of a torch function that was called with an expression among its arguments."""
    if function is Tensor.__getitem__:
        return _gather(*args)
    name = getattr(function, "__name__", str(function))
    builder = FUNCTIONS.get(function)
    if builder is None:
        name = resolve_name(function) or name
        listed = ", ".join(sorted(BUILDERS))
        of_columns = _over_columns(name.rpartition(".")[2])
        raise TraceError(f"{name} has no kernel code{of_columns}; there are: {listed}")
    return _build(name, builder, *args, **options)


def _build(name: str, builder: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if "input" in options:
        args = (options.pop("input"), *args)
    if options.get("inplace") is False:
        del options["inplace"]
    graphs = [arg.graph for arg in (*args, *options.values()) if isinstance(arg, Expression)]
    if not args or not graphs:
        raise TraceError(f"{name}: expected a value of the element first")
    try:
        return builder(graphs[0].expression(args[0]), *args[1:], **options)
    except TraceError:
        raise
    except TypeError as error:
        raise TraceError(f"{name}: {str(error).rpartition('() ')[2]}") from None


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _gather(tensor: Any, index: Any) -> Any:
    if isinstance(tensor, Expression):
        return tensor[index]
    indices = index if isinstance(index, tuple) else (index,)
    while indices and (indices[-1] is Ellipsis or _is_all(indices[-1])):
        indices = indices[:-1]
    if len(indices) < tensor.dim():
        return Part(tensor, indices, _gather)
    graph: Any = next(each.graph for each in indices if isinstance(each, Expression))
    return graph.gather(tensor, indices)


Expression.vocabulary = sys.modules[__name__]
