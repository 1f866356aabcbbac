"""What ops call into: the functions of `_C`, torch's current stream, and the compiler of users' functions.

All three are thread-local objects, so that a dry run (dry_run.py) can replace them in its own thread: it runs
ops on tensors without memory, and records the calls. Setting an attribute affects the current thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monoidreduce import _C as compiled
from monoidreduce._torch_private import current_stream

__all__ = ["_C", "streams", "user_kernels"]


class Streams(threading.local):
    """`current(index)` returns the handle of torch's current stream on that GPU."""

    current = staticmethod(current_stream)


streams = Streams()


class UserKernels(threading.local):
    """How kernels of users' functions are made for a GPU. A dry run changes all but the last.

    Attributes:
        load: whether to compile and load them.
        assumed: whether to assume that the build has CUDA and that there is a compiler, instead of looking.
        capability: the compute capability of the GPU; None: ask the device.
        units: where kernels that are not loaded are noted; `DryRun.units`.
        recorded: the op that this thread runs, its arguments, and which of these need gradients, while
            autograd records it (folds/cuda/ahead.py).
    """

    load = True
    assumed = False
    capability: tuple[int, int] | None = None
    units: list[tuple[Any, ...]]
    recorded: tuple[str, tuple[Any, ...], tuple[bool, ...]] | None = None


user_kernels = UserKernels()


def _by_position(name: str) -> Callable[..., Any]:
    """The function `name` of `_C`, which makes plans, with all arguments passed by position.

    pybind11 looks up the name of each argument that is not: two thirds of the time of planning.
    """
    fields = compiled.CALLS[name.removeprefix("plan_")]
    names = ", ".join([*(f.name for f in fields), "deterministic, tf32, planes, gpu"])
    plan: Any = eval(f"lambda {names}: make({names})", {"make": getattr(compiled, name)})
    plan.__defaults__ = (*(f.default for f in fields), False, False, False, None)
    return plan  # type: ignore[no-any-return]


if TYPE_CHECKING:
    from monoidreduce import _C
else:
    _planning = {
        name: staticmethod(_by_position(name)) for name in vars(compiled) if name.startswith("plan_")
    }
    _C = type("Kernels", (threading.local,), {**vars(compiled), **_planning})()
