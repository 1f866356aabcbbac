"""Forward and backward pass of the op `cpp_monoid`, a fold by a monoid in C++. They need a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, user_kernels
from monoidreduce._ops.memory import empty_statistics, launch_on, rounded_gradients
from monoidreduce.folds.cpp.cpp_kernels import FOLD, GRADIENT, fold_plan, gradient_plan, loaded
from monoidreduce.folds.cpp.cpp_laws import check
from monoidreduce.folds.cpp.cpp_source import CppSource, parse
from monoidreduce.folds.cuda import compiler
from monoidreduce.folds.cuda.cuda_passes import multiplied_by_torch
from monoidreduce.folds.operands import Operands
from monoidreduce.workspace import get_workspace

__all__ = ["backward", "check_device", "forward", "results"]


def check_device(a: Tensor) -> None:
    """Raise RuntimeError unless `a` is on a GPU, the build has CUDA, and NVRTC is available."""
    needs = "a monoid of cpp_monoid is compiled for a GPU: "
    instead = "; a function of monoidreduce.statistics runs on any device"
    if not a.is_cuda:
        given = "cpu" if a.is_cpu else a.device
        raise RuntimeError(f"{needs}expected tensors on a CUDA device, got one on {given}{instead}")
    if user_kernels.assumed:
        return
    if not _C.build_info()["cuda"]:
        raise RuntimeError(f"{needs}expected a build of monoidreduce with CUDA, got one that is CPU-only")
    if compiler.find() is None:
        raise RuntimeError(f"{needs}expected NVRTC, found none: pip install nvidia-cuda-nvrtc")


def _results(monoid: CppSource, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty_statistics(a, monoid.count("real"), len(a)),
        empty_statistics(a, monoid.count("kept"), len(a)),
        a.new_empty(monoid.count("index"), len(a), dtype=torch.int64),
    )


def results(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    label: Tensor | None,
    monoid: str,
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(parse(monoid), a)


def _labels(label: Tensor | None, a: Tensor) -> Tensor:
    """[1, rows] int64 labels; -1, which is no column, if there are none."""
    return a.new_full((1, len(a)), -1, dtype=torch.int64) if label is None else label.contiguous()[None]


def forward(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    label: Tensor | None,
    monoid: str,
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, kept numbers (read by the gradient only), and indices, each [numbers, rows]."""
    check_device(a)
    if user_kernels.load:
        check(monoid, a.device)
    operands = (a, b, other_a, other_b)
    folded = _results(parse(monoid), a)
    plan = fold_plan(operands)
    values, kept, indices = folded
    _C.statistics_fold(
        *operands,
        None,  # data of rows and of columns
        None,
        _labels(label, a),
        None,
        None,  # tables
        None,
        values,
        kept,
        indices,
        empty_statistics(a, plan.scratch),
        *(None,) * 4,  # planes
        loaded(FOLD, monoid, a.dtype, a.device.index),
        0,  # words of a state: the host does not know how many
        False,
        scale,
        *launch_on(a),
        plan,
    )
    return folded


def backward(
    grad_values: Tensor,
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    label: Tensor | None,
    values: Tensor,
    kept: Tensor,
    indices: Tensor,
    monoid: str,
    scale: float,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    """The gradients of the operands."""
    check_device(a)
    operands: Operands = (a, b, other_a, other_b)
    known = torch.cat((values, kept, grad_values))
    integers = torch.cat((_labels(label, a), indices))
    bytes = (get_workspace() if workspace is None else workspace) // parse(monoid).scores
    plan = gradient_plan(operands)
    kernel = loaded(GRADIENT, monoid, a.dtype, a.device.index)

    def store(part: slice, out: Tensor | None, other_out: Tensor | None) -> None:
        of_second = None if other_b is None else other_b[part]
        assert out is not None
        _C.statistics_local_gradient(
            a,
            b[part],
            other_a,
            of_second,
            known,
            None,
            integers,
            None,
            None,  # tables
            None,
            out,
            other_out,
            *(None,) * 4,  # planes
            kernel,
            part.start,
            scale,
            bytes,
            *launch_on(a),
            plan,
        )

    found = multiplied_by_torch(operands, store, bytes, needed[:4])
    return rounded_gradients(found, operands, needed[:4], unrounded)
