"""How GPUs multiply float32 operands."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from typing import NamedTuple

from monoidreduce._validate import check_choice

__all__ = ["Products", "float32", "float32_products", "get_float32", "set_float32"]


class Products(NamedTuple):
    """How kernels may multiply float32 operands: rounded to tf32 if torch allows it; in planes of float16."""

    tf32: bool
    planes: bool


_MODES = {"auto": Products(True, False), "emulated": Products(False, True), "simt": Products(False, False)}
_process_wide = "auto"
_scoped: ContextVar[str | None] = ContextVar("monoidreduce_float32", default=None)


def get_float32() -> str:
    """The mode: from the enclosing `float32(mode)`, else from `set_float32`, else "auto"."""
    scoped = _scoped.get()
    return _process_wide if scoped is None else scoped


def float32_products() -> Products:
    """What the mode allows."""
    return _MODES[get_float32()]


def set_float32(mode: str) -> None:
    """Set the mode for all threads that are not inside `float32(mode)`.

    Raises ValueError unless `mode` is one of the modes of `float32`.
    """
    global _process_wide
    check_choice("mode", mode, (*_MODES,))
    _process_wide = mode


class float32(ContextDecorator):
    """Context manager (and decorator) that says how GPUs multiply float32 operands.

    It holds for operators called in this thread or async task, and for their backward passes, wherever these
    run.

    mode:
        "auto": on ordinary cores. Attention and MLPs use tensor cores, in tf32, if torch allows it.
        "emulated": on Hopper's tensor cores where there are kernels for it, in planes of float16: most
            calls 1.7 to 5 times as fast as torch's float32, with errors of its size (docs/numerics.md). tf32
            is not used.
        "simt": on ordinary cores, every product in float32; torch computes large MLPs there.

    The mode is read when an operator runs. A block inside a function that torch.compile traces has no effect.
    One around the call of such a function holds for its forward pass. Its backward pass runs in a thread of
    autograd, which is outside of the block, and takes the mode of `set_float32`: set that for compiled
    functions. `mr.explain` says which kernels a call takes.

    Raises ValueError unless `mode` is one of these.
    """

    def __init__(self, mode: str) -> None:
        check_choice("mode", mode, (*_MODES,))
        self._mode = mode
        self._token: Token[str | None] | None = None

    def _recreate_cm(self) -> float32:
        """A fresh context for one call of a decorated function."""
        return float32(self._mode)

    def __enter__(self) -> None:
        self._token = _scoped.set(self._mode)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _scoped.reset(self._token)
        self._token = None
