"""What a function reads besides its arguments: closure variables and globals.

A trace of the function is valid as long as these are the same objects, or equal numbers.
"""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from monoidreduce._dynamo import names_in
from monoidreduce.folds import stat
from monoidreduce.folds.program.arguments import definition
from monoidreduce.folds.program.vocabulary import METHODS

__all__ = ["Captures", "described", "read_by"]

# Modules whose functions do not change between calls.
_CONSTANT_MODULES = {
    "torch",
    "math",
    "monoidreduce",
    "torch.nn",
    "torch.nn.functional",
    "torch.special",
    "monoidreduce.stat",
}
# Built-in functions whose result depends only on their arguments. Others may read hidden state.
_PURE = (
    *(abs, all, any, bool, dict, divmod, enumerate, float, int, isinstance, len, list, map, max, min, pow),
    *(range, reversed, round, set, slice, sorted, str, sum, tuple, type, zip),
)
_PLAIN = (bool, int, float, str, type(None), Tensor)


class Captures:
    """The variables that a function, and functions that it calls, read from closures and globals.

    values: their values when this object was made. complete: whether the function's result depends only on
    them. It does not if the function reads attributes of objects, or calls something that may read other
    state, such as `globals` or `torch.get_default_dtype`; such a function is traced again in every call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functions: list[Any] = [function]  # grows while the loop finds functions that are called
        self.values: list[Any] = []
        self.complete = True
        for reader in functions:
            values = read_by(reader)
            self.values += values
            modules = [value for value in values if isinstance(value, types.ModuleType)]
            if not all(_is_pure(name, reader.__globals__, modules) for name in names_in(reader.__code__)):
                self.complete = False
            for value in values[1:]:
                if isinstance(value, types.FunctionType) and not _is_ours(value):
                    if value not in functions:
                        functions.append(value)
                elif not (
                    value is _ABSENT
                    or isinstance(value, _PLAIN)
                    or (isinstance(value, types.ModuleType) and value.__name__ in _CONSTANT_MODULES)
                    or (_is_ours(value) and _computes(value, value.__name__))
                ):
                    self.complete = False

        # Without the function itself: a weak table keyed by it holds these captures.
        self.others = functions[1:]
        self.kinds = _kinds(self.values)

    def hold(self, function: Any) -> bool:
        """Whether the function and those it calls still read the same objects, or equal numbers.

        False if that is not known. function: the function that these captures belong to.
        """
        if not self.complete:
            return False
        now = read_by(function)
        for other in self.others:
            now += read_by(other)
        if len(now) != len(self.values):
            return False
        changed = [(x, y) for x, y in zip(now, self.values, strict=True) if x is not y]
        for x, y in changed:
            if type(x) is not type(y) or not isinstance(x, _PLAIN[:4]) or not _equal(x, y):
                return False
        return not self.kinds or _kinds(now) == self.kinds


def places_in(function: Any, tensor: Tensor) -> list[tuple[str, Any]]:
    """All closure cells and globals through which a function reads a tensor."""
    cells = [i for i, cell in enumerate(function.__closure__ or ()) if _contents(cell) is tensor]
    names = [n for n in names_in(function.__code__) if function.__globals__.get(n) is tensor]
    return [*(("closure", i) for i in cells), *(("global", name) for name in names)]


def described(tensor: Tensor, *functions: Any) -> str:
    """Description of a captured tensor for errors: file and line of the function, variable, and shape."""
    at, variable = definition(next(iter(functions), None)), ""
    for function in functions:
        if isinstance(function, types.FunctionType):
            for kind, which in places_in(function, tensor):
                names = function.__code__.co_freevars
                at, variable = definition(function), f" {names[which] if kind == 'closure' else which},"
    return f"{at[0]}:{at[1]}: captured tensor{variable} of shape {list(tensor.shape)}"


def _kinds(values: list[Any]) -> list[tuple[Any, int]]:
    """Dtypes and numbers of axes of the tensors among values; `t.data = other` can change these."""
    return [(t.dtype, t.dim()) for t in values if isinstance(t, Tensor)]


_ABSENT = object()  # stands for a name that is not a global (it may be an attribute's)


def read_by(function: Any) -> list[Any]:
    """A function's code, and the values that it reads itself: defaults, closure variables and globals."""
    variables, named = function.__globals__, function.__kwdefaults__ or {}
    return [
        function.__code__,
        *(function.__defaults__ or ()),
        *named,
        *named.values(),
        *[_contents(cell) for cell in function.__closure__ or ()],
        *[variables.get(name, _ABSENT) for name in names_in(function.__code__)],
    ]


def _equal(x: Any, y: Any) -> bool:
    """Whether two numbers are equal; 0.0 and -0.0 are not."""
    return bool(x == y) and (not isinstance(x, float) or math.copysign(1.0, x) == math.copysign(1.0, y))


def _is_ours(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return isinstance(value, (types.BuiltinFunctionType, type, types.FunctionType)) and (
        module.split(".")[0] in ("torch", "math", "monoidreduce", "builtins")
    )


def _is_pure(name: str, variables: Mapping[str, Any], modules: list[types.ModuleType]) -> bool:
    """Whether a name in code cannot refer to a function that reads more than its arguments.

    variables: the function's globals. modules: the modules that it reads.
    """
    if name not in variables and hasattr(builtins, name):
        return getattr(builtins, name) in _PURE or isinstance(getattr(builtins, name), type)
    return all(_computes(vars(module)[name], name) for module in modules if name in vars(module))


def _computes(value: Any, name: str) -> bool:
    """Whether an object of torch, math or this library is constant, or a function of its arguments only.

    The trace sees torch functions that compute with tensors, but not functions that read a setting.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__ in _CONSTANT_MODULES
    if not callable(value) or isinstance(value, type):
        return True
    if value in _PURE or value.__module__ in ("math", stat.__name__):
        return True
    return name in METHODS or hasattr(Tensor, name)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
