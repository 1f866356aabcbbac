"""The private names of torch that the library uses: their purpose, and what happens if a torch lacks them.

Private names of torch's compiler are in `_dynamo.py`; if one is missing, the call runs outside of the graph.

A missing name with a substitute is replaced by it. For any other missing name the import of the library fails
with an error that names it. No call may fail or be wrong because of a missing name.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "PLAIN",
    "DispatchMode",
    "SingleLevelFunction",
    "allows_tf32",
    "are_plain",
    "autocast_is_on",
    "autograd_is_next",
    "backend_is_next",
    "below_autograd",
    "can_read",
    "current_stream",
    "forward_ad_on",
    "frees_saved",
    "gradients_are_differentiated",
    "has_hooks",
    "has_tangent",
    "in_forward_mode",
    "inductor_keeping",
    "is_observed",
    "is_transformed",
    "mark_constant",
    "mark_untraced",
    "modes_are_active",
    "plain_torch_function",
    "primal_of",
    "register_namedtuple",
    "register_namedtuples",
    "single_level",
    "transforms_are_active",
    "tree_leaves",
    "tree_map",
    "without_fakes",
]


def _required(path: str) -> Any:
    """The object at a dotted path, importing its first module; raises ImportError if it is missing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(reduce(getattr, module.split(".")[1:], __import__(module)), name)
    except (AttributeError, ImportError):
        raise ImportError(f"monoidreduce needs {path}, which torch {torch.__version__} has not") from None


def _optional(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


# For the Autograd kernels of the ops (_ops/registry.py). A single-level Function records the kernel's
# computation at the current level of torch.func's transforms. No substitute: `Function.apply` would go
# through all levels again.
SingleLevelFunction: Any = _required("torch.autograd.function._SingleLevelFunction")
single_level: Callable[[], Any] = _required("torch._functorch.utils.enable_single_level_autograd_function")
# Calls an op below autograd. No substitute.
below_autograd: Callable[[], Any] = _required("torch._C._AutoDispatchBelowAutograd")
# Whether a transform of torch.func is active. No substitute: results under it would be silently wrong.
transforms_are_active: Callable[[], bool] = _required("torch._C._are_functorch_transforms_active")
# Forward-mode AD. No substitute: the tangent would be lost.
_forward_ad: Any = _required("torch.autograd.forward_ad")
forward_ad_on: Callable[[bool], Any] = _required("torch.autograd.forward_ad._set_fwd_grad_enabled")
_required("torch.autograd.forward_ad._current_level")
_forward_ad_enabled: Callable[[], bool] = _required("torch._C._is_fwd_grad_enabled")
# Records the ops of a dry run (_ops/dry_run.py) and their tensor arguments. No substitute.
DispatchMode: Any = _required("torch.utils._python_dispatch.TorchDispatchMode")
_pytree: Any = _required("torch.utils._pytree")
tree_leaves: Callable[[Any], list[Any]] = _required("torch.utils._pytree.tree_leaves")
tree_map: Callable[..., Any] = _required("torch.utils._pytree.tree_map")
# Number of active dispatch modes, such as a FLOP counter. If missing, one is assumed to be active.
_count_modes: Any = _optional(torch._C, "_len_torch_dispatch_stack")
# The active dispatch mode of a kind, and that before autograd (`make_fx(pre_dispatch=True)`). No substitute:
# a check would read values that are traced.
_mode_of: Callable[[Any], Any] = _required("torch._C._get_dispatch_mode")
_mode_before_autograd: Callable[[Any], Any] = _required("torch._ops._get_dispatch_mode_pre_dispatch")
_mode_kinds: Any = _required("torch._C._TorchDispatchModeKey")
# Number of active function modes, and whether a profiler records ops. If missing, it is assumed that one is
# active.
_count_function_modes: Any = _optional(torch._C, "_len_torch_function_stack")
_profiler_enabled: Any = _optional(torch._C._autograd, "_profiler_enabled")
# The `__torch_function__` of a tensor subclass that behaves as a plain tensor. No substitute.
plain_torch_function: Any = _required("torch._C._disabled_torch_function_impl")
# A dry run uses tensors of its own, even inside the caller's fake tensor mode. No substitute.
without_fakes: Callable[[], Any] = _required("torch._subclasses.fake_tensor.unset_fake_temporarily")

# The current stream, on which kernels are launched. The private function is 40 times as fast as the public
# one.
_raw_stream: Any = _optional(torch._C, "_cuda_getCurrentRawStream")


def _public_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


current_stream: Callable[[int], int] = _public_stream if _raw_stream is None else _raw_stream

_keys_below_autograd: Any = _optional(torch._C, "_after_ADInplaceOrView_keyset")
_dispatch_key: Any = _required("torch._C.DispatchKey")
_backends = (_dispatch_key.CPU, _dispatch_key.CUDA)
_reaches_backend: dict[int, bool] = {}
# The keys that the thread adds to those of tensors, such as that of a mode, and whether it takes a key away.
_included_keys: Any = _optional(torch._C, "_dispatch_tls_local_include_set")
_excludes: Any = _optional(torch._C, "_dispatch_tls_is_dispatch_key_excluded")
# The dispatch keys of a tensor. If missing, ops are always dispatched, and saved tensors never overwritten.
_keys_of: Any = _optional(torch._C, "_dispatch_keys")
PLAIN = (Tensor, nn.Parameter)  # torch's own types of tensors, which intercept no call


def _key_set(*names: str) -> Any:
    return reduce(or_, (_required("torch._C.DispatchKeySet")(getattr(_dispatch_key, name)) for name in names))


# The keys of a thread without modes, transforms and tracers; and those of a tensor that is only memory.
_ordinary_inclusion = _key_set("BackendSelect", "ADInplaceOrView")
_autograd_key: Any = _optional(_dispatch_key, "AutogradFunctionality")
_plain_bits = frozenset(
    _key_set(device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}").raw_repr()
    for device in ("CPU", "CUDA")
)
# Whether the running backward pass keeps its graph (retain_graph). If missing, it is assumed to.
_keeps_graph: Any = _optional(_required("torch._C._autograd"), "_get_current_graph_task_keep_graph")
# The first is missing before torch 2.9.
_fp32_precision: Any = _optional(torch._C, "_get_fp32_precision_getter")
# Whether autocast is on for any device. If missing, it is assumed to be.
_any_autocast: Any = _optional(torch._C, "_is_any_autocast_enabled")
_functorch: Any = _required("torch._C._functorch")
for _name in ("get_interpreter_stack", "get_unwrapped", "is_batchedtensor"):
    _required(f"torch._C._functorch.{_name}")
_gradient: Any = _required("torch._C._functorch.TransformType").Grad


def in_forward_mode() -> bool:
    """Whether tensors may have tangents of forward-mode AD."""
    return _forward_ad._current_level >= 0 and _forward_ad_enabled()


def has_tangent(tensors: Iterable[Any]) -> bool:
    """Whether one of these has a tangent of forward-mode AD; those that are not tensors have none."""
    if not in_forward_mode():
        return False
    of = (_unbatched(t) for t in tensors if isinstance(t, Tensor))
    return any(_forward_ad.unpack_dual(t).tangent is not None for t in of)


def _unbatched(t: Tensor) -> Tensor:
    """A tensor as the levels around torch.vmap see it."""
    while _functorch.is_batchedtensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def gradients_are_differentiated() -> bool:
    """Whether torch.func differentiates gradients: transforms of gradients within each other, or within
    forward mode."""
    gradients = [each for each in _functorch.get_interpreter_stack() or () if each.key() == _gradient]
    return len(gradients) > (1 if _forward_ad._current_level < 0 else 0)


def primal_of(value: Any) -> Any:
    """A tensor without its tangent of forward-mode AD; anything else as it is."""
    return _forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def autocast_is_on() -> bool:
    """Whether autocast is on for any device."""
    return _any_autocast is None or _any_autocast()


def modes_are_active() -> bool:
    return _count_modes is None or _count_modes() > 0


def can_read(t: Tensor) -> bool:
    """Whether a check may read values of a tensor: the host need not wait for them, and nothing traces or
    transforms the call. Modes that only look on, such as a FLOP counter, do not matter."""
    if torch.compiler.is_compiling() or transforms_are_active() or _is_traced():
        return False
    return type(t) in PLAIN and t.is_cpu


def _is_traced() -> bool:
    """Whether `make_fx` traces, which intercepts plain tensors too, or tensors are fake, without values."""
    kinds = (_mode_kinds.PROXY, _mode_kinds.FUNCTIONAL)
    if any(of(kind) is not None for of in (_mode_of, _mode_before_autograd) for kind in kinds):
        return True
    return _mode_of(_mode_kinds.FAKE) is not None


def backend_is_next(keys: Any) -> bool:
    """Whether the dispatcher would go from an Autograd kernel straight to a backend kernel, for these keys.

    If so, the Autograd kernel calls the backend directly, which saves host time. Answers are cached by the
    bits of the key set; there are few. If torch lacks the needed name, the answer is False.
    """
    bits = keys.raw_repr()
    reaches = _reaches_backend.get(bits)
    if reaches is None:
        reaches = _reaches_backend[bits] = (
            _keys_below_autograd is not None
            and (keys & _keys_below_autograd).highestPriorityTypeId() in _backends
        )
    return reaches


def autograd_is_next(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the dispatcher would go from an op of these tensors straight to its Autograd kernel and from
    that to the backend's, and no mode or profiler sees it.

    Then `call_op` calls the Autograd kernel itself, which saves host time. If torch lacks a needed name, the
    answer is False.
    """
    if _included_keys is None or _excludes is None or _autograd_key is None:
        return False
    if _included_keys() != _ordinary_inclusion or _excludes(_autograd_key) or _is_watched():
        return False
    return are_plain(tensors)


def is_captured() -> bool:
    """Whether the current stream is being captured in a CUDA graph.

    torch is only asked once CUDA is initialised; before that nothing can be captured.
    """
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use and torch.cuda.is_current_stream_capturing()


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether ops of these tensors go straight to the backend's kernels, below autograd."""
    for t in tensors:  # half the time of all()
        if t is not None and (
            type(t) not in PLAIN or _keys_of is None or _keys_of(t).raw_repr() not in _plain_bits
        ):
            return False
    return True


def is_observed() -> bool:
    """Whether something beside the backend's kernel may see an op that a backward node calls.

    That is if the pass is traced or recorded (create_graph), or a transform, forward mode, a mode or a
    profiler is active.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or transforms_are_active():
        return True
    return modes_are_active() or _is_watched()


def _is_watched() -> bool:
    """Whether forward mode, a function mode or a profiler is active."""
    if _forward_ad._current_level >= 0 or _count_function_modes is None or _count_function_modes() > 0:
        return True
    if _profiler_enabled is None or _profiler_enabled():
        return True
    # A profiler of all threads sets this alone.
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def frees_saved() -> bool:
    """Whether the running backward node may overwrite its saved tensors, because nobody reads them
    afterwards: the pass is not kept (retain_graph), or captured in a CUDA graph."""
    return _keeps_graph is not None and not _keeps_graph() and not is_captured()


def allows_tf32() -> bool:
    """Whether matrix products of float32 CUDA tensors may use tf32.

    Since torch 2.9 the precision has a name, and reading the older flag raises if the name was set.
    """
    if _fp32_precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(_fp32_precision("cuda", "matmul") == "tf32")


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward or backward hooks. Missing lists count as empty."""
    lists = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in lists)


def inductor_keeping(share: float) -> Any:
    """torch.compile's default backend with a limit on saved activations.

    share: fraction of the activations that it may save, relative to its default; a lower limit set in torch's
    config still applies. This imports the compiler. If a private name is missing, there is no limit.
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
    """Let torch.export save a NamedTuple under a name. If torch lacks the function, it cannot be saved."""
    if _register_namedtuple is not None:
        _register_namedtuple(kind, serialized_type_name=name)


def register_namedtuples(prefix: str, load: Callable[[str], None]) -> None:
    """Make torch.export call `load`, which registers the type, before it loads a NamedTuple with this name
    prefix.

    If torch lacks the table that is patched here, only types that are already registered can be loaded.
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
    """Let the compiler call a function while it traces, like `torch.compiler.assume_constant_result`.

    That function would import the compiler; the mark does not. A compiler that ignores the mark traces the
    function.
    """
    function._dynamo_marked_constant = True


def mark_untraced(function: Any, reason: str) -> None:
    """Keep a function out of graphs, like `torch.compiler.disable`, but without importing the compiler.

    reason: shown in the error of fullgraph=True; torch 2.6 shows the function's name instead. A compiler that
    ignores the mark traces the function.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
