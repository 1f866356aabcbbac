"""Private names of torch that the library uses: what they are for, and what happens in a torch without them.

Those of its compiler are in `_dynamo.py`: a call in a graph that needs one which is gone runs outside.

A name that has a substitute is replaced by it. Without one of the others the import of the library fails, and
names it. No call may be wrong, or fail, for a name that is gone.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "DispatchMode",
    "FakeTensorMode",
    "SingleLevelFunction",
    "allows_tf32",
    "backend_is_next",
    "below_autograd",
    "current_stream",
    "forward_ad_on",
    "frees_saved",
    "has_hooks",
    "has_tangent",
    "inductor_keeping",
    "is_transformed",
    "mark_constant",
    "mark_untraced",
    "modes_are_active",
    "register_namedtuple",
    "register_namedtuples",
    "single_level",
    "transforms_are_active",
    "tree_leaves",
    "tree_map",
    "without_fakes",
]


def _required(path: str) -> Any:
    """The name at `path`, which may begin with modules that are not loaded yet."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(reduce(getattr, module.split(".")[1:], __import__(module)), name)
    except (AttributeError, ImportError):
        raise ImportError(f"monoidreduce needs {path}, which torch {torch.__version__} has not") from None


def _optional(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


# Autograd kernels of the ops (_ops/registry.py). A Function of one level records what the kernel computes, at
# the level of torch.func's transforms that the dispatcher is at. No substitute: `Function.apply` asks again.
SingleLevelFunction: Any = _required("torch.autograd.function._SingleLevelFunction")
single_level: Callable[[], Any] = _required("torch._functorch.utils.enable_single_level_autograd_function")
# Calls an op below autograd. No substitute.
below_autograd: Callable[[], Any] = _required("torch._C._AutoDispatchBelowAutograd")
# Is a transform of torch.func at work. No substitute: its results would be silently wrong.
transforms_are_active: Callable[[], bool] = _required("torch._C._are_functorch_transforms_active")
# Forward-mode AD, which no op has: a tangent is refused. No substitute: it would be lost.
_forward_ad: Any = _required("torch.autograd.forward_ad")
forward_ad_on: Callable[[bool], Any] = _required("torch.autograd.forward_ad._set_fwd_grad_enabled")
_required("torch.autograd.forward_ad._current_level")
_forward_ad_enabled: Callable[[], bool] = _required("torch._C._is_fwd_grad_enabled")
# Runs the checks of a call for `explain`, without its work. No substitute.
FakeTensorMode: Any = _required("torch._subclasses.fake_tensor.FakeTensorMode")
# Sees the ops of a dry run (theory/costs/dry_run.py), and the tensors among their arguments. No substitute.
DispatchMode: Any = _required("torch.utils._python_dispatch.TorchDispatchMode")
_pytree: Any = _required("torch.utils._pytree")
tree_leaves: Callable[[Any], list[Any]] = _required("torch.utils._pytree.tree_leaves")
tree_map: Callable[..., Any] = _required("torch.utils._pytree.tree_map")
# Does a mode look on at ops, as a counter of flops does. In a torch that does not tell one always may.
_count_modes: Any = _optional(torch._C, "_len_torch_dispatch_stack")
# A dry run has tensors of its own, also where the caller makes fake ones. No substitute.
without_fakes: Callable[[], Any] = _required("torch._subclasses.fake_tensor.unset_fake_temporarily")

# Kernels run at the stream that is current. The private way is 40 times as fast as the public one.
_raw_stream: Any = _optional(torch._C, "_cuda_getCurrentRawStream")


def _public_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


current_stream: Callable[[int], int] = _public_stream if _raw_stream is None else _raw_stream

_keys_below_autograd: Any = _optional(torch._C, "_after_ADInplaceOrView_keyset")
_dispatch_key: Any = _required("torch._C.DispatchKey")
_backends = (_dispatch_key.CPU, _dispatch_key.CUDA)
_reaches_backend: dict[int, bool] = {}
# The dispatch keys of a tensor. Where a torch does not tell, nothing that was saved is changed.
_keys_of: Any = _optional(torch._C, "_dispatch_keys")
# Does the backward pass that runs keep what its nodes saved. A torch that does not tell keeps it.
_keeps_graph: Any = _optional(_required("torch._C._autograd"), "_get_current_graph_task_keep_graph")
# Since torch 2.9, and since torch 2.7.
_fp32_precision: Any = _optional(torch._C, "_get_fp32_precision_getter")
_functorch: Any = _required("torch._C._functorch")


def has_tangent(tensors: Iterable[Any]) -> bool:
    """Does forward-mode AD differentiate by one of these, which need not be tensors."""
    if _forward_ad._current_level < 0 or not _forward_ad_enabled():
        return False
    tangents = (_forward_ad.unpack_dual(t).tangent for t in tensors if isinstance(t, Tensor))
    return any(tangent is not None for tangent in tangents)


def modes_are_active() -> bool:
    return _count_modes is None or _count_modes() > 0


def backend_is_next(keys: Any) -> bool:
    """Does nothing stand between an Autograd kernel and a backend's, by the dispatch keys of a call.

    Then the dispatcher need not be asked again, which is host time. They are few, and remembered by their
    bits. A torch that does not tell is asked again.
    """
    bits = keys.raw_repr()
    reaches = _reaches_backend.get(bits)
    if reaches is None:
        reaches = _reaches_backend[bits] = (
            _keys_below_autograd is not None
            and (keys & _keys_below_autograd).highestPriorityTypeId() in _backends
        )
    return reaches


def is_captured() -> bool:
    """Does a CUDA graph capture what runs now. Without a use of CUDA nothing does, nor may torch be asked."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and torch.cuda.is_current_stream_capturing()


def frees_saved(*operands: Tensor | None) -> bool:
    """Whether the backward node that runs may change what was saved for it: nobody reads it afterwards.

    The pass is neither traced nor recorded, and will not come again, as that of a CUDA graph may. No mode
    looks on, as one that counts FLOPs does, and each of the node's operands is one that the backend's kernel
    takes as it is.
    """
    once = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    once = once and not (transforms_are_active() or modes_are_active())
    freed = once and _keeps_graph is not None and not _keeps_graph() and _keys_of is not None
    return freed and all(t is None or backend_is_next(_keys_of(t)) for t in operands) and not is_captured()


def allows_tf32() -> bool:
    """May matrix products of CUDA tensors round their factors to tf32.

    Since torch 2.9 the precision is asked for by name, and what was asked before raises where it was set so.
    """
    if _fp32_precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(_fp32_precision("cuda", "matmul") == "tf32")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody is told when the module runs. A torch that keeps no such list tells nobody."""
    lists = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in lists)


def inductor_keeping(share: float) -> Any:
    """torch.compile's default backend, which keeps at most this share of the activations that it would keep,
    or less where torch was told so.

    Loads the compiler. Without one of the names it keeps as much as it would.
    """
    try:
        options: Any = _required("torch._functorch.config.patch")
        inductor: Any = _required("torch._dynamo.backends.registry.lookup_backend")("inductor")
    except ImportError:
        return "inductor"

    def backend(graph: Any, inputs: Any, **how: Any) -> Any:
        told: float = _required("torch._functorch.config.activation_memory_budget")
        with options(activation_memory_budget=min(share, told)):
            return inductor(graph, inputs, **how)

    return backend


def is_transformed(tensor: Tensor) -> bool:
    """Whether torch.func batches or differentiates a tensor, at any level of its transforms."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor) or tensor.requires_grad:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


_register_namedtuple: Any = _optional(_pytree, "_register_namedtuple")


def register_namedtuple(kind: type, name: str) -> None:
    """Let torch.export save a NamedTuple by a name. A torch without that function does not save it."""
    if _register_namedtuple is not None:
        _register_namedtuple(kind, serialized_type_name=name)


def register_namedtuples(prefix: str, load: Callable[[str], None]) -> None:
    """Before torch.export loads a NamedTuple whose name has this prefix it calls `load`, which registers it.

    A torch that keeps no list of how contexts are loaded loads those that are registered.
    """
    known = getattr(_pytree, "SUPPORTED_SERIALIZED_TYPES", {}).get(namedtuple)
    if known is None or not hasattr(known, "_replace"):
        return
    load_context = known.from_dumpable_context

    def loaded(name: Any) -> Any:
        if isinstance(name, str) and name.startswith(prefix):
            load(name)
        return load_context(name)

    _pytree.SUPPORTED_SERIALIZED_TYPES[namedtuple] = known._replace(from_dumpable_context=loaded)


def mark_constant(function: Any) -> None:
    """Let a compiler call a function while it traces, as `torch.compiler.assume_constant_result` does, which
    loads the compiler. A compiler that knows the mark no more would trace the function."""
    function._dynamo_marked_constant = True


def mark_untraced(function: Any, reason: str) -> None:
    """Keep a function out of graphs, as `torch.compiler.disable` does, which loads the compiler for seconds.

    The reason is what fullgraph=True says; torch 2.6 says the name of the function. A compiler that knows the
    mark no more would trace the function.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
