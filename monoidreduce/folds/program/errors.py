"""Errors of what users write, functions and monoids: they name the user's line."""

from __future__ import annotations

import linecache
import os
import sys
from traceback import walk_tb
from typing import Any

import torch

__all__ = ["CppMonoidError", "TraceError", "line_of", "user_line"]

# What lies between a traced function and this file.
_OURS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def user_line() -> tuple[str, int]:
    """File and line of the innermost caller that is neither of this package nor of torch."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost frame of an error that is neither of this package nor of torch."""
    frames = walk_tb(error.__traceback__)
    found = [(f.f_code.co_filename, line) for f, line in frames if not f.f_code.co_filename.startswith(_OURS)]
    return found[-1] if found else None


class TraceError(TypeError):
    """A traced function does what kernels cannot.

    Attributes:
        file, line: where the function does it.
        source: the text of that line.
        reason: what is wrong, without the place.
    """

    def __init__(self, message: str, at: tuple[str, int] | None = None) -> None:
        self.file, self.line = user_line() if at is None else at
        self.source = linecache.getline(self.file, self.line).strip()
        self.reason = message
        super().__init__(f"{self.file}:{self.line}: {message}\n    {self.source}".rstrip())


class CppMonoidError(TypeError):
    """The text of a monoid of `cpp_monoid` is not C++, or not a monoid of the library's concepts.

    Attributes:
        file, line: where the first mistake is.
        log: all that the compiler said.
    """

    def __init__(self, found: list[tuple[int, str, str]], file: str, name: str, log: str) -> None:
        """found: lines of the file, what is said of each, and their text."""
        self.found, self.file, self.name, self.log = found, file, name, log
        self.line = found[0][0]
        said = (f"{file}:{line}: {text}\n    {quoted}".rstrip() for line, text, quoted in found)
        super().__init__("\n".join((f"the monoid {name} does not compile", *said)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.file, self.name, self.log)
