"""Raises TraceError if a traced function draws random numbers or reads a clock or the environment.

A function runs once per call, so such a number would be the same for all elements. Random functions of torch
are known by the tags of its operations. Python calls are watched by the profiler hook when a function is
first traced. That does not see calls of numpy, which are found by the names and objects that the function
reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any
from weakref import WeakSet

import torch

from monoidreduce.folds.program.arguments import definition
from monoidreduce.folds.program.errors import TraceError

__all__ = ["OUTSIDE", "Watched", "draws", "refuse_draws_of_numpy"]

OUTSIDE = (
    "the function runs once a call, so this is one number for all elements. Make it outside: one for each "
    "element's row or column is a tensor that the function indexes, one for all a number that it reads"
)

_MODULES = ("random", "secrets", "uuid", "time", "os", "posix", "nt", "numpy.random", "torch.random")
_OF_NOW = {"now", "today", "utcnow"}  # methods of datetime's classes
# Modules that may call such functions internally; a line of a log has a time, for example.
_ALLOWED = ("logging", "warnings", "linecache", "tokenize", "torch", "monoidreduce")
_seen: WeakSet[CodeType] = WeakSet()


@lru_cache(1024)
def draws(function: Any) -> bool:
    """Whether a function or method of torch draws random numbers."""
    operation = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    # __eq__ and others are methods of torch.ops.aten itself.
    overloads: Iterable[str] = getattr(operation, "overloads", tuple)()
    return any(torch.Tag.nondeterministic_seeded in getattr(operation, name).tags for name in overloads)


class Watched:
    """Context in which random numbers, clocks and the environment raise TraceError.

    Each code object is watched only once, and none while another profiler is active.
    """

    def __init__(self, codes: Iterable[CodeType]) -> None:
        self._codes = [*codes]

    def __enter__(self) -> None:
        seen = self._codes and all(code in _seen for code in self._codes)
        self._watches = not seen and sys.getprofile() is None
        self._around = sys._getframe(1)
        if self._watches:
            sys.setprofile(self._refuse)

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._watches:
            sys.setprofile(None)
        if kind is None:
            _seen.update(self._codes)
        del self._around  # the frame keeps the caller's variables alive

    def _refuse(self, frame: FrameType, event: str, of: Any) -> None:
        """The profiler hook.

        frame: frame of the called function; for a C function, its caller's. of: that function.
        """
        if event == "call":
            module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        elif event == "c_call":
            module, name = _module_of(of), of.__name__
        else:
            return
        if not _is_of_the_moment(module, name):
            return
        caller = frame.f_back if event == "call" else frame
        at = None
        while caller is not None and caller is not self._around:
            within = str(caller.f_globals.get("__name__"))
            if _is_within(within, _ALLOWED):
                return
            if at is None and within.partition(".")[0] not in sys.stdlib_module_names:
                at = caller.f_code.co_filename, caller.f_lineno
            caller = caller.f_back
        name = "environ" if module == "os" and name == "__getitem__" else name
        raise TraceError(f"{module}.{name}: {OUTSIDE}", at)


def refuse_draws_of_numpy(function: Any, read: Iterable[Any], names: Iterable[str]) -> None:
    """Raise TraceError if a function uses numpy.random.

    read: values of the variables that the function reads. names: names in its code.
    """
    for value in read:
        module = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
        if module is not None and (
            _is_within(module, ("numpy.random",)) or (module == "numpy" and "random" in names)
        ):
            raise TraceError(f"numpy.random: {OUTSIDE}", definition(function))


def _module_of(value: Any) -> str | None:
    """The module of a function, of an object's class, or of the class of a method's object."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        value = owner if isinstance(owner, type) else type(owner)
    module = getattr(value, "__module__", None) or type(value).__module__
    return module if isinstance(module, str) else None


@lru_cache(4096)
def _is_of_the_moment(module: Any, name: str) -> bool:
    if module in ("datetime", "_datetime"):
        return name in _OF_NOW
    return isinstance(module, str) and _is_within(module, _MODULES)


def _is_within(module: str, modules: tuple[str, ...]) -> bool:
    return module in modules or module.startswith(tuple(f"{outer}." for outer in modules))
