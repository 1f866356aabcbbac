"""`explain` for folds of user functions and monoids: which kernels a call would run, and why."""

from __future__ import annotations

from typing import Any

import torch

from monoidreduce import _C
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.explanation import Explanation, architecture_of, name_of
from monoidreduce.folds.cpp_monoid_op import check_device
from monoidreduce.folds.cuda import compiler
from monoidreduce.folds.cuda.cuda_source import state_words
from monoidreduce.folds.program.program import parse
from monoidreduce.workspace import get_workspace

__all__ = ["explain_cpp_monoid", "explain_statistics"]


def explain_statistics(
    name: str, operands: tuple[Any, ...], program: str, workspace: int | None
) -> Explanation:
    """The kernels of a call of a `statistics` function.

    name: the function's name. operands: a, b, other_a, other_b. program: its program as text. workspace:
    bytes; None for the default.
    """
    a = operands[0]
    operations = len(parse(program).nodes)
    shared = (
        "the gradient by data of rows or of columns is one more forward pass each",
        f"the inputs are {name_of(a.dtype)}, sums and statistics {name_of(accumulation_dtype(a.dtype))}",
    )
    if a.is_cuda:
        bytes = get_workspace() if workspace is None else workspace
        return _explain_statistics_on_cuda(name, operands, program, bytes, operations, shared)
    path = f"cpu/{_C.cpu_isa_of(a)}/{name_of(a.dtype)}"
    count: Any = _C.cpu_tiles
    folded = [None if t is None else t.detach()[None, None] for t in operands]
    options = {"payload": None, "bias_gradient": False, "threads": torch.get_num_threads()}
    return Explanation(
        operator=name,
        forward=f"statistics_forward/{path}",
        backward=f"statistics_backward/{path}",
        architecture=_C.cpu_isa(),
        tiles=count(*folded, **options),
        workspace=None,
        deterministic=True,
        reasons=(
            f"the function is a program of {operations} operations, which the CPU engine interprets",
            *shared,
        ),
    )


def _explain_statistics_on_cuda(
    name: str,
    operands: tuple[Any, ...],
    program: str,
    workspace: int,
    operations: int,
    shared: tuple[str, ...],
) -> Explanation:
    a, found, dtype = operands[0], compiler.find(), name_of(operands[0].dtype)
    if found is None:
        paths = (f"statistics_forward/cuda/torch/{dtype}", f"statistics_backward/cuda/torch/{dtype}")
        how: tuple[str, ...] = (
            "there is no compiler for kernels, so torch computes some columns at a time, many times slower: "
            "pip install nvidia-cuda-nvrtc",
        )
    else:
        scores = 1 if operands[2] is None else 2
        a, b, other_a, other_b = operands
        forward = _C.plan_statistics_fold(a, b, other_a, other_b, state_words=state_words(program))
        backward = _C.plan_statistics_row_gradient(a, b, other_a, other_b, workspace=workspace)
        part = "row_gradient"
        if not backward.narrow:
            backward = _C.plan_statistics_local_gradient(
                *(a, b, other_a, other_b),
                workspace=workspace // scores,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            part = "local_gradient"
        paths = (
            f"statistics_fold/cuda/{forward.tier}/{dtype}",
            f"statistics_{part}/cuda/{backward.tier}/{dtype}",
        )
        version = ".".join(map(str, found.version))
        how = (
            f"the function is a program of {operations} operations",
            f"NVRTC {version} compiles it, {found.path}",
            f"forward: {forward}",
            f"backward: {backward}",
        )
    return Explanation(
        operator=name,
        forward=paths[0],
        backward=paths[1],
        architecture=architecture_of(a.device),
        tiles=None,
        workspace=workspace,
        deterministic=found is not None,
        reasons=(*how, *shared),
    )


def explain_cpp_monoid(name: str, a: torch.Tensor, workspace: int | None) -> Explanation:
    """The kernels of a call of a C++ monoid; raises RuntimeError if it cannot run.

    workspace: bytes or None.
    """
    check_device(a)
    found, dtype = compiler.find(), name_of(a.dtype)
    assert found is not None
    return Explanation(
        operator=name,
        forward=f"statistics_fold/cuda/simt/{dtype}",
        backward=f"statistics_local_gradient/cuda/simt/{dtype}",
        architecture=architecture_of(a.device),
        tiles=None,
        workspace=get_workspace() if workspace is None else workspace,
        deterministic=True,
        reasons=(
            "a monoid in C++ runs on the kernels for any GPU, which use no tensor cores",
            f"NVRTC {'.'.join(map(str, found.version))} compiles it, {found.path}",
            "its laws are tried before the first call, once for all processes with the same cache of kernels",
            "torch multiplies the gradients by the scores, of some columns at a time, with the operands",
            f"the inputs are {dtype}, sums and statistics {name_of(accumulation_dtype(a.dtype))}",
        ),
    )
