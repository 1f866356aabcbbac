"""The NamedTuples that calls return, which torch.export saves and loads by name."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any, TypeVar

from monoidreduce._torch_private import register_namedtuple, register_namedtuples

__all__ = ["RESULTS", "exported", "result_name"]

Result = TypeVar("Result", bound=type)
_PREFIX = "monoidreduce."

# Those of functions, as attributes with the names of `result_name`. Compilers find them here; of a dict they
# would know what it had when they first read it.
RESULTS = SimpleNamespace()


def exported(result: Result) -> Result:
    """Decorate a NamedTuple: an exported program may return it."""
    register_namedtuple(result, f"{_PREFIX}{result.__qualname__}")
    return result


def result_name(name: str, fields: tuple[str, ...]) -> str:
    """Makes the NamedTuple of these fields, called as a function is if that has a name; and names it."""
    name = name if name.isidentifier() else "Statistics"
    full = f"{name}({','.join(fields)})"
    if not hasattr(RESULTS, full):
        result: Any = namedtuple(name, fields)  # type: ignore[misc]
        register_namedtuple(result, _PREFIX + full)
        setattr(RESULTS, full, result)
    return full


def _load(full: str) -> None:
    """Makes the NamedTuple of a program that another process has saved."""
    name, _, fields = full.removeprefix(_PREFIX).removesuffix(")").partition("(")
    if fields:
        result_name(name, tuple(fields.split(",")))


register_namedtuples(_PREFIX, _load)
