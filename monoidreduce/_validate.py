"""Argument checks of the operators. Errors name the argument, what was expected, and what was given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch import Tensor

from monoidreduce._torch_private import PLAIN, autocast_is_on, is_transformed

__all__ = [
    "check_axes",
    "check_bool",
    "check_choice",
    "check_factor",
    "check_finite",
    "check_floating",
    "check_int",
    "check_like",
    "check_positive",
    "check_tensor",
    "is_dtensor",
    "mismatch",
    "number_of",
    "remembering",
]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = sys.float_info.max
# Range of factors: kernels multiply by a factor, its reciprocal and its product with log2(e), mostly in
# float32.
LEAST_FACTOR, MOST_FACTOR = 2.0**-100, 2.0**100
SHOWN = 200  # maximum number of characters of a given value in a message

INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def mismatch(name: str, expected: str, got: object) -> str:
    given = str(got)
    if len(given) > SHOWN:
        given = f"{given[: SHOWN - 60]} ... {given[-50:]}"
    return f"{name}: expected {expected}, got {given}"


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor. Does not import torch.distributed.tensor if nothing else has."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(t, tensors.DTensor)


def _called() -> str:
    """The name of the library's function or module that the user called, from the call stack."""
    frame, name = sys._getframe(1), ""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("monoidreduce."):
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("forward", "__call__") else None
        name = frame.f_code.co_name if owner is None else getattr(owner, "__name__", type(owner).__name__)
        frame = frame.f_back  # type: ignore[assignment]
    return name


def check_tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(mismatch(name, "a tensor", f"{value!r} of type {type(value).__name__}"))
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(mismatch(name, "a dense (strided) tensor", kind))
    if type(value) is not Tensor and is_dtensor(value):
        plain = f"a plain tensor in {_called()}, such as {name}.to_local()"
        expected = f"{plain} (with ranks= where ranks have parts of what is folded)"
        placements = getattr(value, "placements", None)
        raise TypeError(mismatch(name, expected, f"a DTensor with placements {placements}"))
    return value


def check_floating(name: str, value: Any) -> Tensor:
    tensor = check_tensor(name, value)
    if tensor.dtype in FLOATING:
        return tensor
    raise TypeError(mismatch(name, "float64, float32, bfloat16 or float16", tensor.dtype))


def check_like(
    name: str, tensor: Tensor, other_name: str, other: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless `tensor` has one of `dtypes` and is on the device of `other`."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise TypeError(mismatch(name, f"{allowed} as {other_name} is {other.dtype}", tensor.dtype))
    if tensor.device != other.device:
        raise ValueError(mismatch(name, f"a tensor on {other.device} as {other_name}", tensor.device))


def check_axes(
    name: str, tensor: Tensor, axes: tuple[str, ...], sizes: dict[Any, Any], of: Tensor | None = None
) -> None:
    """Raise ValueError unless `tensor` has these axes, with the sizes that `sizes` holds; new sizes are
    added.

    sizes: sizes by axis name. It also holds, under the key (name,), the axes and shape of each argument
    checked before; the message shows them, because either of two arguments that disagree may be the wrong
    one.
    of: the tensor that the caller gave, if `tensor` was derived from it.
    """
    shape, known = tensor.shape, len(sizes)
    if len(shape) == len(axes) and shape == tuple(map(sizes.setdefault, axes, shape)):
        sizes[name,] = (axes, shape if of is None else of.shape)
        return
    given = list(sizes)[:known]
    parts = [f"{axis}={sizes[axis]}" if axis in given else axis for axis in axes]
    expected = f"shape [{', '.join(parts)}]"
    others: dict[str, Any] = {}
    for axis in axes:
        for key in given:
            if isinstance(key, tuple) and axis in sizes[key][0]:
                others[key[0]] = list(sizes[key][1])
                break  # the first argument with this axis has set its size
    if others:
        expected += " as " + " and ".join(f"{other} is {size}" for other, size in others.items())
    if len(shape) == len(axes) + 1 > 2 and all(
        axis not in given or sizes[axis] == n for axis, n in zip(axes, shape[1:], strict=True)
    ):
        expected += f" (torch.vmap makes a call for each of a batch of {name})"
    raise ValueError(mismatch(name, expected, list(shape if of is None else of.shape)))


_REMEMBERED = 1024  # calls of each check


def _traits(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """All that a check of operands reads of them: tensors with the same traits pass the same check.

    None if it may read more: of other types than torch's own, under autocast, and while a compiler traces.
    """
    if torch.compiler.is_compiling() or autocast_is_on():
        return None
    traits: list[Any] = []
    for t in tensors:
        if type(t) in PLAIN and not t.is_nested:
            traits += (t.shape, t.dtype, t.device, t.layout)
        elif t is None:
            traits.append(None)
        else:
            return None
    return tuple(traits)


def remembering(
    check: Callable[..., tuple[Sequence[Any], dict[Any, Any]]],
) -> Callable[..., tuple[Sequence[Any], dict[Any, Any]]]:
    """Decorates a check of the operands of a call, which is then made once for operands with the same traits.

    check: takes tensors by position, each may be None, and keywords that matter under autocast alone. Returns
    the tensors, cast if autocast is on, and their sizes (`check_axes`).
    """
    known: dict[Any, dict[Any, Any]] = {}

    @wraps(check)
    def checked(*tensors: Any, **how: Any) -> tuple[Sequence[Any], dict[Any, Any]]:
        traits = _traits(tensors)
        if traits is None:
            return check(*tensors, **how)
        try:
            sizes = known.get(traits)
        except TypeError:  # the sizes of a tracer's tensors have no hash
            return check(*tensors, **how)
        if sizes is None:
            sizes = check(*tensors, **how)[1]
            if len(known) >= _REMEMBERED:
                known.clear()
            known[traits] = sizes
        return tensors, {**sizes}

    return checked


def check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(mismatch(name, "True or False", repr(value)))


def number_of(name: str, value: Any, expected: str) -> Any:
    """The number in a 0-d CPU tensor or numpy array; any other non-tensor is returned unchanged.

    Raises TypeError for a tensor with axes, on a GPU (the host would have to wait), or batched by torch.func;
    ValueError for one that requires a gradient, because none would reach it.
    """
    if not isinstance(value, Tensor):
        is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
        return value.item() if is_array else value
    batched = not torch.compiler.is_compiling() and is_transformed(value)
    if value.dim() or not value.is_cpu or batched:
        expected += f" (of a tensor: without axes, on the CPU; else float({name}), which waits for it)"
        what = "of torch.func" if batched else f"of shape {list(value.shape)}"
        raise TypeError(mismatch(name, expected, f"a tensor on {value.device}, {what}"))
    if value.requires_grad and torch.is_grad_enabled():
        expected += f", which gets no gradient: {name}.detach(), or multiply an input by it"
        raise ValueError(mismatch(name, expected, "a tensor that requires one"))
    return value.item()


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = number_of(name, value, expected)
    if isinstance(number, bool) or not isinstance(number, (int, Integral)):
        raise TypeError(mismatch(name, expected, repr(value)))
    return index(number)


def check_finite(name: str, value: Any, expected: str = "a finite number") -> float:
    given = value
    # The common case first, which is fast. A SymFloat comes from dynamic sizes in torch.export.
    if not isinstance(value, (float, torch.SymFloat)):
        value = number_of(name, value, expected)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(mismatch(name, expected, repr(given)))
    try:
        number = float(value)
    except OverflowError:  # an int too large for a float
        number = math.inf
    if not -LARGEST <= number <= LARGEST:
        raise ValueError(mismatch(name, expected, repr(given)))
    return number


def check_factor(name: str, value: Any) -> float:
    """Check a factor of scores or losses; 0 is allowed."""
    factor = check_finite(name, value)
    if factor != 0 and not LEAST_FACTOR <= abs(factor) <= MOST_FACTOR:
        raise ValueError(mismatch(name, "0 or a magnitude from 2^-100 to 2^100 (8e-31 to 1e30)", repr(value)))
    return factor


def check_positive(name: str, value: Any, instead: str = "") -> float:
    """Check a divisor of scores, which must be positive.

    instead: for the message, what else the argument may be, as "0 or ".
    """
    divisor = check_finite(name, value, f"{instead}a finite number > 0")
    if divisor <= 0:
        raise ValueError(mismatch(name, f"{instead}a finite number > 0", repr(value)))
    if not LEAST_FACTOR <= divisor <= MOST_FACTOR:
        expected = f"{instead}a number from 2^-100 to 2^100 (8e-31 to 1e30)"
        raise ValueError(mismatch(name, expected, repr(value)))
    return divisor


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(mismatch(name, "one of " + ", ".join(choices), repr(value)))
