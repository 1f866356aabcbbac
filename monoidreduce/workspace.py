"""How many bytes the linear losses may use for local gradients, between the passes and in the backward.

And an MLP that comes in parts on a GPU, for hidden values.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

import torch

from monoidreduce._validate import check_int, mismatch

__all__ = ["get_workspace", "set_workspace", "workspace"]

# The most with which a certain step needs at most 640 MiB beyond inputs, outputs and gradients. It has 16384
# tokens and 32000 classes of width 4096. A few per cent are to spare (bench/results, cross entropy).
_process_wide = 352 << 20
_scoped: ContextVar[int | None] = ContextVar("monoidreduce_workspace", default=None)
_traced: int | None = None  # that of the enclosing block of what is being traced: tracers know no ContextVar


def _checked(bytes: int) -> int:
    bytes = check_int("bytes", bytes, "an int >= 0")
    if bytes < 0:
        raise ValueError(mismatch("bytes", "an int >= 0", bytes))
    return bytes


def get_workspace() -> int:
    """The limit in bytes: that of the enclosing `workspace(bytes)`, else of `set_workspace`, else 352 MiB."""
    scoped = _scoped.get()
    return _process_wide if scoped is None else scoped


def traced_workspace() -> int | None:
    """The limit of the enclosing `workspace(bytes)` in what is being traced; None without one."""
    return _traced


def set_workspace(bytes: int) -> None:
    """Set the limit of every thread that is not inside `workspace(bytes)`.

    A smaller limit is slower, never wrong. Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """
    global _process_wide
    _process_wide = _checked(bytes)


class workspace(ContextDecorator):
    """Set the limit for the operators called in this block, in this thread or asynchronous task only.

    The limit is read when an operator is called and holds for its backward, wherever that runs.

    A block inside a compiled or exported function is part of its graph, as the argument `workspace` of an
    operator is. A block around such a function is not: its operators read the limit when their backward runs,
    and so keep no local gradients. On a GPU they then read that of `set_workspace`, since autograd's threads
    are in no block.

    Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """

    def __init__(self, bytes: int) -> None:
        self._bytes = _checked(bytes)
        self._outer: int | None = None
        self._token: Token[int | None] | None = None

    def _recreate_cm(self) -> workspace:
        """The block of one call of a decorated function."""
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
