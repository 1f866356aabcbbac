"""A dry run: the real ops of a call run on tensors without memory, and their plans, launches and allocations
are noted.

The ops themselves make plans, copy, allocate and loop over slices, so no schedule is described twice.
`explain` and the cost model (theory/costs) read the notes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops import engine
from monoidreduce._ops.registry import OPERATORS
from monoidreduce._ops.summed_weights import WEIGHT
from monoidreduce._torch_private import (
    DispatchMode,
    plain_torch_function,
    tree_leaves,
    tree_map,
    without_fakes,
)
from monoidreduce._validate import mismatch
from monoidreduce.flops import backward_flops, forward_flops

__all__ = ["DryRun", "Launch", "Op", "Operand", "Planned", "dry_run", "dry_run_of_torch", "tensors_in"]

_BLOCK = 512  # bytes; torch's CUDA allocator rounds sizes up to it


class Operand(NamedTuple):
    """Shape and dtype of a tensor, and the axes along which its elements repeat (their stride is 0)."""

    shape: torch.Size
    dtype: torch.dtype
    repeated: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """With repeated elements counted as often as they are there."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def bytes_in_memory(self) -> int:
        return self.bytes // math.prod(self.shape[axis] for axis in self.repeated)


@dataclass(frozen=True)
class Launch:
    """A call of a function of `_C`, or of a torch op such as "aten::mm".

    Attributes:
        name: name of the function.
        backward: whether it is in the backward pass.
        arguments: arguments by their names in `_C.CALLS`, without those that are None. For a torch op: "read"
            and "written", lists of Operand.
        plan: the plan of the operator's pass; None on a CPU.
        copied: the tensors of the op, by name, of which the kernel reads a copy.
    """

    name: str
    backward: bool
    arguments: dict[str, Any]
    plan: _C.Plan | None
    copied: tuple[str, ...] = ()


class Planned(NamedTuple):
    """A plan that an op made. name: of the function of `_C` that it is for."""

    name: str
    backward: bool
    plan: _C.Plan


class Op(NamedTuple):
    """An op of this library that the call ran.

    arguments: by the names of its schema. Tensors have no memory.
    """

    name: str
    arguments: dict[str, Any]


@dataclass
class DryRun:
    """The launches of a call, in order, and its memory.

    Attributes:
        differentiated: whether there is a backward pass.
        launches: functions of this library and of torch; one function of this library may launch several
            kernels.
        plans: in the order in which they were made. A pass may need no kernel of its plan, as a backward pass
            whose dlogits forward has saved.
        ops: of the forward pass; the backward pass is that of the last one.
        peak: peak bytes beyond inputs, outputs and gradients, over all passes that ran.
        compulsory: bytes of inputs and upstream gradients, and of outputs and gradients.
        flops: FLOPs of matrix products by `monoidreduce.flops`, without recomputed scores.
        units: what compiles each kernel of a user's function: a function and its arguments, in the order in
            which the call asks for them.
    """

    differentiated: bool
    launches: list[Launch] = field(default_factory=list)
    plans: list[Planned] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    peak: int = 0
    compulsory: int = 0
    flops: int = 0
    units: list[tuple[Any, ...]] = field(default_factory=list)


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    steps = enumerate(zip(value.shape, value.stride(), strict=True))
    return Operand(value.shape, value.dtype, tuple(axis for axis, (n, step) in steps if n > 1 and step == 0))


class _OnGpu(Tensor):
    """A meta tensor that ops take for one on a GPU."""

    is_cuda, is_cpu = True, False
    __torch_function__ = plain_torch_function


class _OnCpu(Tensor):
    """A meta tensor that ops take for one on a CPU."""

    is_cuda, is_cpu = False, True
    __torch_function__ = plain_torch_function


class _Notes(DispatchMode):  # type: ignore[misc]
    """A dispatch mode that records torch ops which move elements, and counts the bytes that are alive.

    Ops of this library run their forward implementation under it, and are recorded in `run.ops`.
    """

    def __init__(self, run: DryRun, kind: type[Tensor], device: torch.device, keeps: bool) -> None:
        super().__init__()
        self.run, self.kind, self.device, self.keeps = run, kind, device, keeps
        self.backward, self.live, self.most = False, 0, 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.given: dict[str, Any] = {}  # arguments of the op that runs
        self.results: Any = None  # of the last op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monoidreduce":
            name = func._schema.name.removeprefix("monoidreduce::")
            names = (a.name for a in func._schema.arguments)
            given = dict(zip(names, args, strict=True))
            if not self.keeps:
                given |= OPERATORS[name].of_shard(given)
            self.given = given
            with self:
                self.results = OPERATORS[name].forward(*given.values())
            self.run.ops.append(Op(name, given))
            return self.results
        kwargs = kwargs or {}
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        captured = [t for t in read if not isinstance(t, self.kind)]
        if captured and len(captured) == len(read):
            # Of tensors that a user's function captured: while it is traced, or as they enter the call.
            results = tree_map(self.placed, func(*args, **kwargs))
            if any(isinstance(t, self.kind) for t in tree_leaves(results)):
                self.check_device(captured)
            return results
        self.check_device(captured)
        by_mask = func is torch.ops.aten.index.Tensor
        if by_mask and any(t.dtype == torch.bool for t in tree_leaves(args[1]) if t is not None):
            return args[0].new_empty(0)  # no value is known: a mask, as of wrong targets, selects nothing
        # A 16-bit product into a float32 result. On meta tensors, torch 2.11 mistakes out_dtype for beta.
        results = kwargs["out"] if func._overloadname == "dtype_out" else func(*args, **kwargs)
        results = tree_map(self.placed, results)
        self.note(func, args, results)
        return results

    def check_device(self, captured: list[Tensor]) -> None:
        """Raise ValueError if a tensor that a user's function captured is not on the call's device."""
        for t in captured:
            if t.dim() and t.device != self.device and self.device.type != "meta":
                raise ValueError(mismatch("captured tensor", f"one on {self.device}", t.device))

    def placed(self, result: Any) -> Any:
        """A result as a tensor that ops take for one where the inputs are."""
        without_memory = type(result) is Tensor and result.is_meta
        return result.as_subclass(self.kind) if without_memory else result

    def note(self, func: Any, args: Any, results: Any) -> None:
        read = args[1:] if func._schema.name == "aten::copy_" else args
        given = [t for t in tree_leaves(read) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        self.hold(made)
        moves = any(t.numel() for t in made) and not (func.is_view or "empty" in func._schema.name)
        if func.namespace != "aten" or not moves:
            return
        operands = {"read": [*map(_described, given)], "written": [*map(_described, made)]}
        self.run.launches.append(Launch(func._schema.name, self.backward, operands, None))

    def hold(self, tensors: list[Tensor]) -> None:
        """Count the memory of new tensors as alive until their storage is freed."""
        for storage in (t.untyped_storage() for t in tensors):
            if storage not in self.known:
                self.known.add(storage)
                size = -(-storage.nbytes() // _BLOCK) * _BLOCK
                self.live += size
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self.release, size)

    def release(self, size: int) -> None:
        self.live -= size


def _noting(name: str, notes: _Notes) -> Callable[..., None]:
    """A function that replaces a call of `_C` and records it instead."""
    names = [f.name for f in _C.CALLS[name]] + ["threads", "stream", "plan"]

    def call(*args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        plan = arguments.pop("plan", None)
        copied = tuple(of for of, value in arguments.items() if _is_copy(value, notes.given.get(of)))
        known = {name: _described(value) for name, value in arguments.items() if value is not None}
        notes.run.launches.append(Launch(name, notes.backward, known, plan, copied))

    return call


def _is_copy(read: Any, given: Any) -> bool:
    """Whether a kernel reads other memory than an op was given."""
    both = isinstance(read, Tensor) and isinstance(given, Tensor)
    return both and read.untyped_storage() is not given.untyped_storage()


def _planning(name: str, notes: _Notes, gpu: _C.DeviceFacts) -> Callable[..., _C.Plan]:
    """A function that replaces a planning function of `_C`: it plans for `gpu`, which need not be present."""
    plan: Callable[..., _C.Plan] = getattr(_C, name)
    of = name.removeprefix("plan_")

    def call(*args: Any, **kwargs: Any) -> _C.Plan:
        made = plan(*args[: len(_C.CALLS[of]) + 2], **{**kwargs, "gpu": gpu})
        notes.run.plans.append(Planned(of, notes.backward, made))
        return made

    return call


def _can_keep(gpu: _C.DeviceFacts) -> Callable[..., bool]:
    """A function that replaces `_C.can_keep`: it answers for `gpu`, which need not be present."""

    def can_keep(device: int | None, width: int, other_width: int, scale: float) -> bool:
        row = torch.empty(1, width, dtype=torch.bfloat16, device="meta")
        return _C.plan_logsumexp_forward(row, row, scale=scale, gpu=gpu).keeps

    return can_keep


@contextmanager
def _substituted(notes: _Notes, gpu: _C.DeviceFacts | None, assumes_compiler: bool) -> Iterator[None]:
    """Context in which the ops of this thread record calls of `_C` instead of launching kernels."""
    calls: Any = {name: _noting(name, notes) for name in _C.CALLS}
    if gpu is not None:
        calls |= {name: _planning(name, notes, gpu) for name in vars(_C) if name.startswith("plan_")}
        calls["can_keep"] = _can_keep(gpu)
    substitutes = {
        engine._C: calls,
        engine.streams: {"current": lambda index: 0},
        engine.user_kernels: {
            "load": False,
            "assumed": assumes_compiler,
            "capability": None if gpu is None else (gpu.major, gpu.minor),
            "units": notes.run.units,
        },
    }
    before = {holder: dict(vars(holder)) for holder in substitutes}
    for holder, of_thread in substitutes.items():
        vars(holder).update(of_thread)
    try:
        yield
    finally:
        for holder, of_thread in before.items():
            vars(holder).clear()
            vars(holder).update(of_thread)


def dry_run(
    function: Callable[..., Any],
    call: dict[str, Any],
    needed: tuple[str, ...],
    gpu: _C.DeviceFacts | None,
    *,
    keeps: bool = True,
    assumes_compiler: bool = True,
) -> DryRun:
    """Dry-run a call and, if gradients are needed, the backward pass of its last op.

    Nothing is computed, no device is used, and no kernel is compiled.

    Args:
        function: of this library, such as `monoidreduce.functional.attention`.
        call: all its arguments by name. The values of tensors are not read.
        needed: names of the tensors that need gradients.
        gpu: the GPU to plan for. None: a CPU, whose engine allocates scratch memory that is not counted here.
        keeps: whether the columns are all columns. False: they are one rank's shard, and forward may save
            less.
        assumes_compiler: whether NVRTC is taken to be there, for kernels of users' functions.

    Raises:
        TypeError, ValueError: the call itself would raise.
    """
    device, mixed = _device_of(call)
    run = DryRun(bool(needed))
    kind = _OnCpu if gpu is None else _OnGpu
    notes = _Notes(run, kind, device, keeps)

    def emptied(name: str, t: Tensor) -> Tensor:
        if t.layout is not torch.strided or t.is_nested:
            return t  # which the call refuses
        is_leaf = name in needed and t.is_floating_point()
        return _without_memory(t).as_subclass(kind).requires_grad_(is_leaf)

    with (
        _substituted(notes, gpu, assumes_compiler),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_fakes(),
    ):
        call = {name: _with_tensors(name, value, emptied) for name, value in call.items()}
        inputs = {t.untyped_storage(): t.nbytes for _, t in tensors_in(call) if t.layout is torch.strided}
        notes.known.update(inputs)
        with notes:
            output = function(**call)
        if mixed:  # which the call itself refuses, but for its other errors
            raise ValueError(mixed)
        # Detached, so that nothing keeps alive what autograd has recorded.
        output = [t.detach() for t in tree_leaves(output) if isinstance(t, Tensor)]
        outputs = sum(t.nbytes for t in output)
        run.peak = notes.most - outputs
        run.compulsory = sum(inputs.values()) + outputs
        name, given = run.ops[-1]
        of = OPERATORS[name]
        run.flops = forward_flops(name, *map(_shape, given.values()))
    if needed:
        with _substituted(notes, gpu, assumes_compiler), torch.no_grad(), without_fakes():
            results = notes.results if isinstance(notes.results, tuple) else (notes.results,)
            notes.results, notes.given, notes.backward = None, given, True
            # A gradient of the first result; of statistics, where both may be empty, also of payload sums.
            followed = results[: of.differentiable if name == "statistics" else 1]
            upstream = [torch.empty_like(t).as_subclass(kind) for t in followed]
            kept, arguments = of.residuals(results), [*given.values()]
            wanted = [isinstance(t, Tensor) and t.requires_grad for t in arguments][: of.inputs]
            del results
            notes.known.update(t.untyped_storage() for t in upstream)
            grads = (*upstream, *[None] * (of.differentiable - len(upstream)))
            of_backward = (*grads, *arguments[: of.inputs], *kept, *arguments[of.inputs :], wanted)
            sum_to, given_to_backward = call.get("weight_grad"), of_backward
            if sum_to is not None and wanted[WEIGHT]:  # as call_adding of summed_weights.py has it
                added = [each and i != WEIGHT for i, each in enumerate(wanted)]
                given_to_backward = (*of_backward[:-1], added, False, False, sum_to)
            with notes:
                found = of.freeing(*given_to_backward)
            gradients = sum(t.nbytes for t in found)
            run.peak = max(run.peak, notes.most - outputs - gradients)
            run.compulsory += sum(inputs.values()) + sum(t.nbytes for t in upstream) + gradients
            run.flops += backward_flops(name, *map(_shape, of_backward), recomputed=False)
    return run


def dry_run_of_torch(
    function: Callable[..., Any], call: dict[str, Any], needed: tuple[str, ...], gpu: _C.DeviceFacts | None
) -> DryRun:
    """`dry_run` of a function that runs ops of torch alone, as `map_reduce`. `flops` is not set."""
    device, mixed = _device_of(call)
    if mixed:
        raise ValueError(mixed)
    run, leaves = DryRun(bool(needed)), list[Tensor]()
    kind = _OnCpu if gpu is None else _OnGpu
    notes = _Notes(run, kind, device, True)

    def emptied(name: str, t: Tensor) -> Tensor:
        is_leaf = name in needed and t.is_floating_point()
        made = _without_memory(t).as_subclass(kind).requires_grad_(is_leaf)
        leaves.extend([made] if is_leaf else [])
        return made

    with torch.inference_mode(False), torch.enable_grad(), without_fakes():
        call = {name: _with_tensors(name, value, emptied) for name, value in call.items()}
        inputs = {t.untyped_storage(): t.nbytes for _, t in tensors_in(call)}
        notes.known.update(inputs)
        with notes:
            output = function(**call)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        outputs = sum(t.nbytes for t in results)
        run.peak, run.compulsory = notes.most - outputs, sum(inputs.values()) + outputs
        real = [t for t in results if t.requires_grad]
        if leaves and real:
            notes.backward = True
            upstream = [torch.empty_like(t).as_subclass(kind) for t in real]
            notes.known.update(t.untyped_storage() for t in upstream)
            with notes:
                found = torch.autograd.grad(real, leaves, upstream, allow_unused=True)
            gradients = sum(t.nbytes for t in found if t is not None)
            run.peak = max(run.peak, notes.most - outputs - gradients)
            run.compulsory += sum(inputs.values()) + sum(t.nbytes for t in upstream) + gradients
    return run


def _with_tensors(name: str, value: Any, new: Callable[[str, Tensor], Any]) -> Any:
    """An argument with new(name, tensor) in place of each tensor in it; an argument may be a dict or tuple of
    tensors or a record, such as a BlockMask."""
    if isinstance(value, Tensor):
        return new(name, value)
    if isinstance(value, dict):
        return {key: _with_tensors(f"{name}[{key!r}]", t, new) for key, t in value.items()}
    if type(value) is tuple:
        return tuple(_with_tensors(f"{name}[{i}]", t, new) for i, t in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _with_tensors(name, getattr(value, f.name), new) for f in fields(value)}
        )
    return value


def tensors_in(call: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors of a call, and their names."""
    found: list[tuple[str, Tensor]] = []
    for name, value in call.items():
        _with_tensors(name, value, lambda name, t: found.append((name, t)))
    return found


def _device_of(call: dict[str, Any]) -> tuple[torch.device, str | None]:
    """The device of the first tensor of a call, and an error if another one is elsewhere: tensors without
    memory are all on one device. Beside tensors of the device meta a record may be anywhere."""
    given = tensors_in(call)
    first, device = given[0][0], given[0][1].device
    for name, t in given:
        if t.device != device and not (device.type == "meta" and is_dataclass(call.get(name))):
            return device, mismatch(name, f"a tensor on {device} as {first}", t.device)
    return device, None


def _without_memory(t: Tensor) -> Tensor:
    """A meta tensor of the same shape and strides, whose address is as far from a multiple of 16 bytes.

    The address is not 0: ops refuse tensors without one whose values they read.
    """
    misaligned = t.data_ptr() % 16 if type(t) in (Tensor, torch.nn.Parameter) else 0
    first = (16 + misaligned) // t.element_size()
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    memory = torch.empty(first + max(extent, 0) + 1, dtype=t.dtype, device="meta")
    return memory.as_strided(t.shape, t.stride(), first)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value
