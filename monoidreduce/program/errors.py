"""Errors of functions that are traced: they name the user's line."""

from __future__ import annotations

import linecache
import os
import sys

import torch

__all__ = ["TraceError", "user_line"]

# What lies between a traced function and this file.
_OURS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def user_line() -> tuple[str, int]:
    """File and line of the innermost caller that is neither of this package nor of torch."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class TraceError(TypeError):
    """A traced function does what kernels cannot.

    Attributes:
        file, line: where the function does it.
        source: the text of that line.
    """

    def __init__(self, message: str, at: tuple[str, int] | None = None) -> None:
        self.file, self.line = user_line() if at is None else at
        self.source = linecache.getline(self.file, self.line).strip()
        super().__init__(f"{self.file}:{self.line}: {message}\n    {self.source}".rstrip())
