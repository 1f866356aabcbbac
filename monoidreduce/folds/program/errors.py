"""Errors in users' functions and C++ monoids; they point to the user's line."""

from __future__ import annotations

import linecache
import os
import sys
from traceback import walk_tb
from typing import Any

import torch

__all__ = ["CppMonoidError", "TraceError", "line_of", "user_line"]

# Folders whose frames may lie between a traced function and this file.
_OURS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def user_line() -> tuple[str, int]:
    """File and line of the innermost caller outside of this package and torch."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def line_of(error: BaseException) -> tuple[str, int] | None:
    """File and line of an error's innermost frame outside of this package and torch.

    None if there is none.
    """
    frames = walk_tb(error.__traceback__)
    found = [(f.f_code.co_filename, line) for f, line in frames if not f.f_code.co_filename.startswith(_OURS)]
    return found[-1] if found else None


class TraceError(TypeError):
    """A traced function does something that kernels cannot do.

    Attributes:
        file, line: the place in the function.
        source: the text of that line.
        reason: what is wrong, without the place.
    """

    def __init__(self, message: str, at: tuple[str, int] | None = None) -> None:
        self.file, self.line = user_line() if at is None else at
        self.source = linecache.getline(self.file, self.line).strip()
        self.reason = message
        super().__init__(f"{self.file}:{self.line}: {message}\n    {self.source}".rstrip())


class CppMonoidError(TypeError):
    """The text given to `cpp_monoid` is not valid C++, or its struct does not satisfy the library's concepts.

    Attributes:
        file, line: the place of the first error.
        log: the compiler's whole output.
    """

    def __init__(self, found: list[tuple[int, str, str]], file: str, name: str, log: str) -> None:
        """found: (line of the file, message, text of the line) of each error."""
        self.found, self.file, self.name, self.log = found, file, name, log
        self.line = found[0][0]
        said = (f"{file}:{line}: {text}\n    {quoted}".rstrip() for line, text, quoted in found)
        super().__init__("\n".join((f"the monoid {name} does not compile", *said)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.file, self.name, self.log)
