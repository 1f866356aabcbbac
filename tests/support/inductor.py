"""torch.compile's default backend without its C++: Inductor up to the graphs that it would write code of.

It traces, decomposes and partitions. A compiler of C++ then takes two seconds for each kernel, half a minute
for a layer of a model.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest


def without_code(graph: Any, inputs: Any, **how: Any) -> Any:
    """The backend. The graphs of the forward and backward passes run as they are."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def run(graph: Any, inputs: Any, **how: Any) -> Any:
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=run, **how)


def leave_out_code(patch: pytest.MonkeyPatch) -> None:
    """Layers of models are compiled by this backend, as if none had been compiled."""
    import torch._dynamo.backends.registry as registry

    from monoidreduce.integrations import _layers

    registry.lookup_backend("inductor")  # so that it is registered
    patch.setitem(registry._COMPILER_FNS, "inductor", without_code)
    patch.setattr(_layers, "_compiled", functools.cache(_layers._compiled.__wrapped__))
