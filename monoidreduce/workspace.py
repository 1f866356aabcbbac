"""How many bytes the linear losses may use for local gradients, between the passes and in the backward.

And an MLP that comes in parts on a GPU, for hidden values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from monoidreduce._validate import mismatch

__all__ = ["get_workspace", "set_workspace", "workspace"]

_process_wide = 128 << 20
_scoped: ContextVar[int | None] = ContextVar("monoidreduce_workspace", default=None)


def _checked(bytes: int) -> int:
    if isinstance(bytes, bool) or not isinstance(bytes, int):
        raise TypeError(mismatch("bytes", "an int >= 0", repr(bytes)))
    if bytes < 0:
        raise ValueError(mismatch("bytes", "an int >= 0", bytes))
    return bytes


def get_workspace() -> int:
    """The limit in bytes: that of the enclosing `workspace(bytes)`, else of `set_workspace`, else 128 MiB."""
    scoped = _scoped.get()
    return _process_wide if scoped is None else scoped


def set_workspace(bytes: int) -> None:
    """Set the limit of every thread that is not inside `workspace(bytes)`.

    A smaller limit is slower, never wrong. Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """
    global _process_wide
    _process_wide = _checked(bytes)


@contextmanager
def workspace(bytes: int) -> Iterator[None]:
    """Set the limit for the operators called in this block, in this thread or asynchronous task only.

    The limit is read when an operator is called and holds for its backward, wherever that runs. Compiled and
    exported calls read one when their backward runs, and so keep no local gradients unless they are given a
    workspace of their own; on a GPU they read that of `set_workspace`: autograd's threads are in no block.
    Raises TypeError or ValueError unless `bytes` is an int >= 0.
    """
    token = _scoped.set(_checked(bytes))
    try:
        yield
    finally:
        _scoped.reset(token)
