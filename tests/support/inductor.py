"""Inductor, torch.compile's default backend, without code generation.

It traces, decomposes and partitions, but compiles no C++: that takes two seconds for each kernel, half a
minute for a layer of a model.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest


def without_code(graph: Any, inputs: Any, **how: Any) -> Any:
    """The backend. It runs the graphs of the forward and backward passes without compiling them."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def run(graph: Any, inputs: Any, **how: Any) -> Any:
        return make_boxed_func(graph.forward)

    return compile_fx(graph, inputs, inner_compile=run, **how)


def leave_out_code(patch: pytest.MonkeyPatch) -> None:
    """Compile layers of models with this backend, with an empty cache of compiled layers."""
    import torch._dynamo.backends.registry as registry

    from monoidreduce.integrations import _layers

    registry.lookup_backend("inductor")  # so that it is registered
    patch.setitem(registry._COMPILER_FNS, "inductor", without_code)
    patch.setattr(_layers, "_compiled", functools.cache(_layers._compiled.__wrapped__))
