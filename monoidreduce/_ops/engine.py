"""What ops call: the functions of `_C`, torch's current stream, and the compiler of users' functions.

A thread may put others in their place: a dry run (dry_run.py) runs ops on tensors without memory, and notes
the calls. Then an attribute of this thread hides that of all threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from monoidreduce import _C as compiled
from monoidreduce._torch_private import current_stream

__all__ = ["_C", "streams", "user_kernels"]


class Streams(threading.local):
    """`current(index)`: the handle of the stream that is current on a GPU."""

    current = staticmethod(current_stream)


streams = Streams()


class UserKernels(threading.local):
    """Kernels of users' functions on a GPU.

    load: whether they are compiled and loaded. assumed: whether a compiler is taken to be there, unseen.
    """

    load = True
    assumed = False


user_kernels = UserKernels()

if TYPE_CHECKING:
    from monoidreduce import _C
else:
    _C = type("Kernels", (threading.local,), dict(vars(compiled)))()
