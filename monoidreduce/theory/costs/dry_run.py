"""A dry run: the real ops of a call run on tensors without memory, and their launches and allocations are
noted.

The ops themselves make plans, allocate and loop over slices, so no schedule is described twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce import _C, functional
from monoidreduce._ops import engine
from monoidreduce._ops.cross_entropy import rank_may_save
from monoidreduce._ops.registry import OPERATORS
from monoidreduce._torch_private import DispatchMode, tree_leaves, without_fakes
from monoidreduce._validate import check_choice, mismatch
from monoidreduce.flops import FORMULAS
from monoidreduce.inspection import MODS, wide_plans
from monoidreduce.theory.costs.sizes import SIZES

__all__ = ["DryRun", "Launch", "Operand", "dry_run"]

_BLOCK = 512  # bytes; torch's CUDA allocator rounds sizes up to it
MOST = 1 << 24  # largest axis of a tensor; with such an axis the model takes seconds


class Operand(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """A call of a function of `_C`, or of a torch op such as "aten::mm".

    Attributes:
        name: name of the function.
        backward: whether it is in the backward pass.
        arguments: arguments by their names in `_C.CALLS`, without those that are None. For a torch op: "read"
            and "written", lists of Operand.
        plan: the plan of the operator's pass; None on a CPU.
    """

    name: str
    backward: bool
    arguments: dict[str, Any]
    plan: _C.Plan | None


@dataclass
class DryRun:
    """The launches of a call, in order, and its memory.

    Attributes:
        launches: functions of this library and of torch; one function of this library may launch several
            kernels.
        peak: peak bytes beyond inputs, outputs and gradients, over all passes that ran.
        compulsory: bytes of inputs and upstream gradients, and of outputs and gradients.
        flops: FLOPs of matrix products by `monoidreduce.flops`, without recomputed scores.
    """

    launches: list[Launch] = field(default_factory=list)
    peak: int = 0
    compulsory: int = 0
    flops: int = 0


def _described(value: Any) -> Any:
    return Operand(value.shape, value.dtype) if isinstance(value, Tensor) else value


class _OnGpu(Tensor):
    """A meta tensor that ops take for one on a GPU."""

    is_cuda = True


class _OnCpu(Tensor):
    """A meta tensor that ops take for one on a CPU."""

    is_cuda = False


class _Notes(DispatchMode):  # type: ignore[misc]
    """A dispatch mode that records torch ops which move elements, and counts the bytes that are alive.

    Ops of this library run their forward implementation under it, and are recorded in `calls`.
    """

    def __init__(self, run: DryRun, needed: tuple[str, ...], keeps: bool) -> None:
        super().__init__()
        self.run, self.needed, self.keeps, self.backward, self.live, self.most = (
            run,
            needed,
            keeps,
            False,
            0,
            0,
        )
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.calls: list[tuple[str, dict[str, Any], Any]] = []  # (op, arguments, results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monoidreduce":
            name = func._schema.name.removeprefix("monoidreduce::")
            names = (a.name for a in func._schema.arguments)
            given = self.differentiated(name, dict(zip(names, args, strict=True)))
            with self:
                results = OPERATORS[name].forward(*given.values())
            self.calls.append((name, given, results))
            return results
        kwargs = kwargs or {}
        # A 16-bit product into a float32 result. On meta tensors, torch 2.11 mistakes out_dtype for beta.
        results = kwargs["out"] if func._overloadname == "dtype_out" else func(*args, **kwargs)
        self.note(func, args, results)
        return results

    def differentiated(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that an op would get if autograd recorded the call; it cannot for these tensors."""
        if "keep" in given:
            student, teacher = ({f"{of}x", f"{of}weight"} & {*self.needed} for of in ("", "teacher_"))
            keep = given["x"].is_cuda and bool(student) and not teacher
            if not self.keeps and name == "linear_cross_entropy":
                keep &= rank_may_save(**given)
            keep &= self.keeps or name != "linear_log_probs"
            given |= {"keep": keep, "x_differentiated": "x" in self.needed}
        if "a_differentiated" in given:
            given["a_differentiated"] = self.keeps and given["a"].is_cuda and "a" in self.needed
        return given

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
        known = {name: _described(value) for name, value in arguments.items() if value is not None}
        notes.run.launches.append(Launch(name, notes.backward, known, plan))

    return call


def _planning(name: str, gpu: _C.DeviceFacts) -> Callable[..., _C.Plan]:
    """A function that replaces a planning function of `_C` and plans for `gpu`, which need not be present."""
    plan: Callable[..., _C.Plan] = getattr(_C, name)

    def call(*args: Any, **kwargs: Any) -> _C.Plan:
        fields = len(_C.CALLS[name.removeprefix("plan_")])
        return plan(*args[: fields + 2], **{**kwargs, "gpu": gpu})

    return call


def _check_modelled(operator: str, call: dict[str, Any], gpu: _C.DeviceFacts | None) -> None:
    """Raise ValueError for a call that the cost model does not cover."""
    check_choice("op", operator, tuple(SIZES))
    for name, value in call.items():
        if isinstance(value, Tensor) and max(value.shape, default=0) > MOST:
            expected = f"at most {MOST} along each axis, whose tiles the model goes through"
            raise ValueError(mismatch(name, expected, [*value.shape]))
    if operator == "attention" and gpu is not None and wide_plans(call, call["q"].dtype, gpu):
        widths = [call["q"].shape[3], call["v"].shape[3]]
        raise ValueError(
            mismatch("q, v", "heads at most 256 wide: the folds of others have no model", widths)
        )
    for name in MODS:
        if call.get(name) is not None:
            raise ValueError(mismatch(name, "None: kernels of modified scores have no model", call[name]))
    mixture = ("loss", "bias", "teacher_bias", "target", "hard_weight")
    if operator == "linear_distillation" and functional.distils_by_statistics(*(call[n] for n in mixture)):
        raise ValueError(mismatch("loss", "none by statistics: jsd, biases or a target", repr(call["loss"])))


@contextmanager
def _substituted(notes: _Notes, gpu: _C.DeviceFacts | None) -> Iterator[None]:
    """Context in which the ops of this thread record calls of `_C` instead of launching kernels."""
    calls: Any = {name: _noting(name, notes) for name in _C.CALLS}
    if gpu is not None:
        calls |= {name: _planning(name, gpu) for name in vars(_C) if name.startswith("plan_")}
    own, streams = vars(engine._C), vars(engine.streams)
    own.update(calls)
    streams["current"] = lambda index: 0
    try:
        yield
    finally:
        own.clear()
        streams.clear()


def dry_run(
    operator: str,
    call: dict[str, Any],
    needed: tuple[str, ...],
    gpu: _C.DeviceFacts | None,
    keeps: bool = True,
) -> DryRun:
    """Dry-run an operator and, if gradients are needed, its backward pass.

    Args:
        operator: name of a function of `monoidreduce.functional`.
        call: all its arguments by name. The values of tensors are not read.
        needed: names of the tensors that need gradients.
        gpu: the GPU to plan for. None: a CPU, whose engine allocates scratch memory that is not counted here.
        keeps: whether the columns are all columns. False: they are one rank's shard, and forward may save
            less.

    Raises:
        TypeError, ValueError: the call itself would raise, or the cost model does not cover it; see
            docs/cost.md, "What it does not know".
    """
    _check_modelled(operator, call, gpu)
    run = DryRun()
    notes = _Notes(run, needed, keeps)

    def emptied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        alike = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return alike.as_subclass(_OnCpu if gpu is None else _OnGpu)

    with _substituted(notes, gpu), torch.no_grad(), without_fakes():
        call = {name: emptied(value) for name, value in call.items()}
        inputs = {t.untyped_storage(): t.nbytes for t in call.values() if isinstance(t, Tensor)}
        notes.known.update(inputs)
        with notes:
            output = getattr(functional, operator)(**call)
        outputs = sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))
        run.peak = notes.most - outputs
        run.compulsory = sum(inputs.values()) + outputs
        ((name, given, results),) = notes.calls
        of = OPERATORS[name]
        run.flops = _flops(name, given)
        if needed:
            results = results if isinstance(results, tuple) else (results,)
            notes.calls, notes.backward = [], True
            upstream, kept, arguments = torch.empty_like(results[0]), of.residuals(results), [*given.values()]
            wanted = [name in needed for name in given][: of.inputs]
            del results
            notes.known.add(upstream.untyped_storage())
            grads = (upstream, *[None] * (of.differentiable - 1))
            of_backward = (*grads, *arguments[: of.inputs], *kept, *arguments[of.inputs :], wanted)
            with notes:
                found = of.freeing(*of_backward)
            gradients = sum(t.nbytes for t in found)
            run.peak = max(run.peak, notes.most - outputs - gradients)
            run.compulsory += sum(inputs.values()) + upstream.nbytes + gradients
            run.flops += FORMULAS[f"{name}_backward"](*map(_shape, of_backward))
            run.flops -= _flops(name, given, scores=True)
    return run


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def _flops(op: str, given: dict[str, Any], scores: bool = False) -> int:
    """FLOPs of an op's forward pass. scores: only of its scores, by counting payloads as of width 0."""
    shapes = {name: _shape(value) for name, value in given.items()}
    if scores and op == "attention":
        shapes["v"] = (*shapes["v"][:3], 0)
    if scores and op in ("mlp", "gated_mlp"):
        shapes["w2"] = (0, shapes["w2"][1])
    return FORMULAS[op](*shapes.values())
