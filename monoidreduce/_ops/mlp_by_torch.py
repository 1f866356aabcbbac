"""A large float32 MLP on a GPU, in parts that torch computes: the products, and what lies between them.

It is for calls that no tensor-core kernel takes. The kernels for ordinary cores multiply at half of cuBLAS's
rate. They hold sums of 128 columns of the output (kSlice in device/simt/fold_forward_simt.cuh), and compute
hidden values again for each 128 more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _torch_private
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import all_contiguous
from monoidreduce._ops.mlp_parts import (
    GradientProducts,
    HiddenPart,
    OutputProduct,
    fitting,
    multiply_hidden,
    multiply_hidden_gradients,
)
from monoidreduce._ops.products import write_product
from monoidreduce.precision import float32_products
from monoidreduce.workspace import get_workspace

__all__ = ["forward", "gradients", "held_part", "is_large", "obstacle", "part_of"]

_SLICE = 128  # columns of the output whose sums a kernel for ordinary cores holds
# torch computes a call from so many multiply-adds of a forward pass by these kernels on. Below, a step by
# torch takes the host longer than theirs takes the GPU (H200,
# bench/results/compare/nvidia_h200_mlp_by_torch.json).
_FEWEST_TERMS = 1 << 28
# Settings of cuBLAS (CUBLAS_WORKSPACE_CONFIG) with which torch multiplies in the deterministic mode.
_REPRODUCIBLE = (":4096:8", ":16:8")

_aten = torch.ops.aten
# Each replaces z, the pre-activations, by act(z).
_VALUE: dict[str, Callable[[Tensor], Any]] = {
    "relu": Tensor.relu_,
    "relu2": lambda z: z.relu_().square_(),
    "gelu": _aten.gelu_,
    "gelu_tanh": lambda z: _aten.gelu_(z, approximate="tanh"),
    "silu": _aten.silu_,
    "tanh": Tensor.tanh_,
    "sigmoid": Tensor.sigmoid_,
    "identity": lambda z: z,
}
# Each replaces g by g act'(z): of (g, z), and of (g, act(z)).
_BY_ARGUMENT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu": lambda g, z: _aten.threshold_backward.grad_input(g, z, 0, grad_input=g),
    "relu2": lambda g, z: g.mul_(z.relu_()).mul_(2),
    "gelu": lambda g, z: _aten.gelu_backward.grad_input(g, z, grad_input=g),
    "gelu_tanh": lambda g, z: _aten.gelu_backward.grad_input(g, z, approximate="tanh", grad_input=g),
    "silu": lambda g, z: _aten.silu_backward.grad_input(g, z, grad_input=g),
}
_BY_VALUE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tanh": lambda g, value: _aten.tanh_backward.grad_input(g, value, grad_input=g),
    "sigmoid": lambda g, value: _aten.sigmoid_backward.grad_input(g, value, grad_input=g),
}


def is_large(x: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Whether torch computes a float32 call that no tensor-core kernel takes, if there is no `obstacle`."""
    (units, width), outputs = w1.shape, w2.shape[0]
    terms = len(x) * units * (width * -(-outputs // _SLICE) + outputs)
    return x.dtype == torch.float32 and x.numel() > 0 and w2.numel() > 0 and terms >= _FEWEST_TERMS


def held_part(
    x: Tensor, w1: Tensor, w2: Tensor, workspace: int | None, backward: bool
) -> tuple[int, int] | None:
    """(rows, hidden units) of a part whose hidden values the workspace holds, backward also their gradients.

    Forward it has all units. Backward it has all rows or all units, so that the smaller gradients are summed
    over parts, if the workspace allows it. None if it holds no part.
    """
    workspace = get_workspace() if workspace is None else workspace
    rows, units, bytes_of_each = len(x), len(w1), (2 if backward else 1) * x.element_size()
    parts = [(fitting(rows, units * bytes_of_each, workspace), units)]
    if backward:
        parts.append((rows, fitting(units, rows * bytes_of_each, workspace)))
        if x.numel() <= w1.numel() + w2.numel():
            parts.reverse()
    return next((part for part in parts if part[0] * part[1] * bytes_of_each <= workspace), None)


def obstacle(part: tuple[int, int] | None) -> str | None:
    """Why the kernels for ordinary cores take a large pass instead of torch. part: `held_part`."""
    if _torch_private.allows_tf32() and not float32_products().tf32:
        return "torch would multiply in tf32, which the mode of mr.float32 excludes"
    in_order = torch.are_deterministic_algorithms_enabled()
    if in_order and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _REPRODUCIBLE:
        return "its products are deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8"
    return "the workspace holds no part of the hidden values" if part is None else None


def part_of(
    plan: _C.Plan, x: Tensor, w1: Tensor, w2: Tensor, workspace: int | None, *, backward: bool
) -> tuple[int, int] | None:
    """(rows, hidden units) of a part, if torch computes the pass. plan: of the pass."""
    if plan.tensor_cores or not is_large(x, w1, w2):
        return None
    part = held_part(x, w1, w2, workspace, backward)
    return part if obstacle(part) is None else None


def forward(
    part: tuple[int, int],
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activation: str,
) -> Tensor:
    # Contiguous: cuBLAS may round the product of a strided operand differently.
    x, w1, w2, bias1, bias2 = all_contiguous(x, w1, w2, bias1, bias2)
    out = x.new_empty(len(x), len(w2))

    def store(x: Tensor, w1: Tensor, bias1: Tensor | None, hidden: Tensor, *planes: Tensor | None) -> None:
        write_product(hidden, x, w1.T, bias1)
        _VALUE[activation](hidden)

    multiply_hidden(store, part, x, w1, bias1, OutputProduct(w2, bias2), out)
    return out


def gradients(
    part: tuple[int, int],
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    activation: str,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, w1, w2 and bias1; None where not needed."""
    grad_out, x, w1, w2, bias1 = all_contiguous(grad_out, x, w1, w2, bias1)
    needs_local = needed[0] or needed[1] or needed[3]

    def store(of: HiddenPart) -> None:
        write_product(of.hidden, of.x, of.w1.T, of.bias1)
        by_argument, by_value = _BY_ARGUMENT.get(activation), _BY_VALUE.get(activation)
        if needs_local:
            write_product(of.out, of.grad_out, of.w2)
            if by_argument is not None:
                by_argument(of.out, of.hidden)
        _VALUE[activation](of.hidden)
        if needs_local and by_value is not None:
            by_value(of.out, of.hidden)

    operands = (grad_out, x, w1, w2)
    products = GradientProducts(*operands, needed[:3], part)
    return multiply_hidden_gradients(store, part, *operands, bias1, products, needed[3], sums_of_groups=False)
