"""What ops call: the functions of `_C` and torch's current stream.

A thread may put others in their place: `theory/costs` runs ops on tensors without memory, and notes the
calls. Then an attribute of this thread hides that of all threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from monoidreduce import _C as compiled
from monoidreduce._torch_private import current_stream

__all__ = ["_C", "streams"]


class Streams(threading.local):
    """`current(index)`: the handle of the stream that is current on a GPU."""

    current = staticmethod(current_stream)


streams = Streams()

if TYPE_CHECKING:
    from monoidreduce import _C
else:
    _C = type("Kernels", (threading.local,), dict(vars(compiled)))()
