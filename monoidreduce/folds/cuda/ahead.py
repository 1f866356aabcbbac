"""Compilation of all kernels of a call at once, in threads.

The host asks for the kernels of a backward pass when the forward pass is done. NVRTC compiles in several
threads at once. So when a call that autograd records finds a unit that is not on disk, a thread finds the
units of both passes by a dry run, and each compiles in a thread of its own. Who needs one waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import Any

import torch

from monoidreduce import _C
from monoidreduce._ops.engine import user_kernels
from monoidreduce.folds.cuda.cache import Image

__all__ = ["compile_others", "image_of", "units_of"]

Unit = tuple[Any, ...]  # a function that compiles, such as `kernels.compiled`, and its arguments

_images: dict[Unit, Future[Image]] = {}  # of units that compile, or that nobody has asked for yet


def image_of(unit: Unit) -> Image:
    """The image of a unit. Raises what its function raises, also if that ran in another thread."""
    own: Future[Image] = Future()
    found = _images.setdefault(unit, own)
    if found is own:
        _compile(unit, own)
    try:
        return found.result()
    finally:
        _images.pop(unit, None)


def compile_others() -> None:
    """Start to compile the other units of the call that this thread runs, if autograd records it."""
    recorded, user_kernels.recorded = user_kernels.recorded, None
    if recorded is None:
        return
    name, arguments, needed = recorded
    device = arguments[0].device
    if device.type == "cuda":
        facts = _C.facts_of(device.index)
        run = copy_context().run  # `float32` is in the context
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            Thread(target=run, args=(_start, name, arguments, needed, facts)).start()


def units_of(
    name: str, arguments: tuple[Any, ...], needed: tuple[bool, ...], gpu: _C.DeviceFacts
) -> list[Unit]:
    """The units of both passes of a call of an op on a GPU, in the order in which the call asks for them.

    needed: for each of the first arguments, whether its gradient is needed.
    """
    # Not at the top: it loads much that other calls do not need.
    from monoidreduce._ops.dry_run import dry_run

    call = {f"argument {i}": argument for i, argument in enumerate(arguments)}
    wanted = tuple(key for key, each in zip(call, needed, strict=False) if each)
    op = getattr(torch.ops.monoidreduce, name).default
    return dry_run(lambda **given: op(*given.values()), call, wanted, gpu).units


def _start(*call: Any) -> None:
    with contextlib.suppress(Exception):  # the call itself raises it
        for unit in dict.fromkeys(units_of(*call)):
            own: Future[Image] = Future()
            if _images.setdefault(unit, own) is own:
                try:
                    Thread(target=_compile, args=(unit, own)).start()
                except RuntimeError:  # there can be no more threads, and others may wait for this unit
                    _compile(unit, own)


def _compile(unit: Unit, to: Future[Image]) -> None:
    make: Callable[..., Image]
    make, *arguments = unit
    try:
        to.set_result(make(*arguments))
    except BaseException as error:
        to.set_exception(error)
