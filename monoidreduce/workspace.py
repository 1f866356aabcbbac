"""The workspace limit: bytes that a linear loss or a log-sum-exp may use for dlogits, saved by forward or
computed in backward.

An MLP that a GPU computes in slices of its hidden units uses it for hidden values.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

import torch

from monoidreduce._validate import check_int, mismatch

__all__ = ["get_workspace", "set_workspace", "workspace"]

# With this default a cross entropy step of 16384 tokens and 32000 classes of width 4096 needs at most 640 MiB
# beyond inputs, outputs and gradients, with a few per cent to spare (bench/results, cross entropy).
_process_wide = 352 << 20
_scoped: ContextVar[int | None] = ContextVar("monoidreduce_workspace", default=None)
_traced: int | None = None  # limit of the enclosing block while tracing; tracers do not support ContextVar


def _checked(bytes: int) -> int:
    bytes = check_int("bytes", bytes, "an int >= 0")
    if bytes < 0:
        raise ValueError(mismatch("bytes", "an int >= 0", bytes))
    return bytes


def get_workspace() -> int:
    """The limit in bytes: from the enclosing `workspace(bytes)`, else from `set_workspace`, else 352 MiB."""
    scoped = _scoped.get()
    return _process_wide if scoped is None else scoped


def traced_workspace() -> int | None:
    """The limit of the enclosing `workspace(bytes)` inside the traced function; None if there is none."""
    return _traced


def set_workspace(bytes: int) -> None:
    """Set the limit for all threads that are not inside `workspace(bytes)`.

    A smaller limit is slower, but never wrong. Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """
    global _process_wide
    _process_wide = _checked(bytes)


class workspace(ContextDecorator):
    """Context manager (and decorator) that sets the limit for operators called in this thread or async task.

    The limit is read when an operator is called, and also holds for its backward, wherever that runs.

    A block inside a compiled or exported function becomes part of its graph, like the argument `workspace` of
    an operator. A block around such a function does not: its operators read the limit only when their
    backward runs, so their forward saves no dlogits. On a GPU they then read the limit of `set_workspace`,
    because autograd's threads are outside the block.

    Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """

    def __init__(self, bytes: int) -> None:
        self._bytes = _checked(bytes)
        self._outer: int | None = None
        self._token: Token[int | None] | None = None

    def _recreate_cm(self) -> workspace:
        """A fresh context for one call of a decorated function."""
        return workspace(self._bytes)

    def __enter__(self) -> None:
        global _traced
        if torch.compiler.is_compiling():
            self._outer, _traced = _traced, self._bytes
        else:
            self._token = _scoped.set(self._bytes)

    def __exit__(self, *_: object) -> None:
        global _traced
        if self._token is None:
            _traced = self._outer
        else:
            _scoped.reset(self._token)
            self._token = None
