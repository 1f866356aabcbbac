"""Registration of the NamedTuples that calls return, so that torch.export can save and load them by name."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any, TypeVar

from monoidreduce._torch_private import register_namedtuple, register_namedtuples

__all__ = ["RESULTS", "exported", "result_name"]

Result = TypeVar("Result", bound=type)
_PREFIX = "monoidreduce."

# The NamedTuples of users' functions, as attributes with the names of `result_name`. Compilers look them up
# here; of a dict they would only know the entries that it had when they first read it.
RESULTS = SimpleNamespace()


def exported(result: Result) -> Result:
    """Class decorator for a NamedTuple that an exported program may return."""
    register_namedtuple(result, f"{_PREFIX}{result.__qualname__}")
    return result


def result_name(name: str, fields: tuple[str, ...]) -> str:
    """Create and register the NamedTuple with these fields for a function called `name`; return its full
    name.

    If the function has no proper name (a lambda), the NamedTuple is called Statistics.
    """
    name = name if name.isidentifier() else "Statistics"
    full = f"{name}[{','.join(fields)}]"  # no parenthesis: AOTInductor writes it into a C++ string R"(...)"
    if not hasattr(RESULTS, full):
        result: Any = namedtuple(name, fields)  # type: ignore[misc]
        register_namedtuple(result, _PREFIX + full)
        setattr(RESULTS, full, result)
    return full


def _load(full: str) -> None:
    """Create the NamedTuple of a program that another process has saved."""
    name, _, fields = full.removeprefix(_PREFIX).removesuffix("]").partition("[")
    if fields:
        result_name(name, tuple(fields.split(",")))


register_namedtuples(_PREFIX, _load)
