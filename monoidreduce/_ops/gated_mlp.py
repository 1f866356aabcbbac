"""The forward and the backward op of the gated MLP (SwiGLU, GeGLU).

torch computes the matrix products; one elementwise kernel of this library does all that lies between them.
Rows or hidden units are processed in parts, so that hidden values and their gradients fit in the workspace.
These have the dtype of x on a GPU, and the accumulation dtype on the CPU. Operands that are not contiguous
are
copied: cuBLAS may round the product of a strided operand differently, and results must not depend on strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    all_contiguous,
    empty_dense,
    launch_on,
    new_bias_gradient,
    rounded_gradients,
)
from monoidreduce._ops.mlp import ACTIVATIONS, MlpOpOptions, new_result
from monoidreduce._ops.mlp_parts import Total, columns_of, parts_of, rows_of
from monoidreduce._ops.products import add_product, fills_a_gpu, without_autocast, write_product
from monoidreduce._ops.registry import UNROUNDED, Fold, register
from monoidreduce.workspace import get_workspace

__all__ = ["backward_part", "forward_part", "hidden_dtype"]

_TILE = 128  # the number of rows, or hidden units, of a part is a multiple of this


def hidden_dtype(dtype: torch.dtype, on_gpu: bool) -> torch.dtype:
    """The dtype of stored hidden values, for inputs of a dtype."""
    return dtype if on_gpu else accumulation_dtype(dtype)


def _fitting(count: int, bytes_of_each: int, workspace: int | None) -> int:
    """The number of rows, or hidden units, of a part: as few parts as the workspace allows, about equal.

    Sizes are rounded up to 1024, if possible, because 1024 x 4096 elements are a wave of tiles on an H100.
    For SwiGLU of Llama 3 8B the gradient of a weight takes 14 waves in parts of 4096 units, but 16 in parts
    of 3584.
    """
    workspace = get_workspace() if workspace is None else workspace
    most = max(workspace // max(bytes_of_each, 1) // _TILE, 1) * _TILE
    even = -(-count // max(-(-count // most), 1))
    rounded_up = (-(-even // step) * step for step in (1024, 512, 256, _TILE))
    return min(count, next(size for size in rounded_up if size <= most))


def forward_part(rows: int, units: int, dtype: torch.dtype, workspace: int | None) -> tuple[int, int]:
    """(rows, hidden units) of a part of the forward pass. It has all units, so that each row of the result is
    one product. dtype: of hidden values."""
    return _fitting(rows, 2 * units * dtype.itemsize, workspace), units


def backward_part(
    rows: int, width: int, units: int, outputs: int, dtype: torch.dtype, workspace: int | None
) -> tuple[int, int]:
    """(rows, hidden units) of a part of the backward pass: it has all rows, or all units.

    With parts of units, the gradient of x is read and written again for each part; with parts of rows, the
    gradients of the weights are. The choice is whichever has fewer elements.
    """
    size = 3 * dtype.itemsize
    if 2 * rows * width <= units * (2 * width + outputs):
        return rows, _fitting(units, rows * size, workspace)
    return _fitting(rows, units * size, workspace), units


class _Matrices:
    """Buffers for `count` matrices [rows, units] of a part. All parts use the same memory."""

    def __init__(self, count: int, x: Tensor, part: tuple[int, int], dtype: torch.dtype) -> None:
        self.flat = [x.new_empty(part[0] * part[1], dtype=dtype) for _ in range(count)]

    def of(self, rows: int, units: int) -> list[Tensor]:
        return [flat[: rows * units].view(rows, units) for flat in self.flat]


def _sums(of: Tensor) -> Tensor:
    """An empty tensor in the accumulation dtype."""
    return of.new_empty(of.shape, dtype=accumulation_dtype(of.dtype))


def _adds_rounded(dx: Tensor) -> bool:
    """Whether the two products of the gradient of x are summed in bfloat16, if a part has all hidden units.

    Then the first product is rounded once more, but no float32 sum is written and read. (torch's own layer
    rounds both products and their sum.) Not in float16, where the first product may overflow; nor for small
    products, which cuBLAS splits and sums in 16 bits.
    """
    return dx.is_cuda and dx.dtype == torch.bfloat16 and fills_a_gpu(dx)


def gated_mlp_result(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
) -> Tensor:
    return new_result(x, w2, options.unrounded_result)


def gated_mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
) -> Tensor:
    out = new_result(x, w2, options.unrounded_result)
    x, w1, w2, gate, bias1, gate_bias, bias2 = all_contiguous(x, w1, w2, gate, bias1, gate_bias, bias2)
    kind, launch, dtype = (
        ACTIVATIONS.index(options.activation),
        launch_on(x),
        hidden_dtype(x.dtype, x.is_cuda),
    )
    part = forward_part(len(x), len(w1), dtype, options.workspace)
    matrices = _Matrices(2, x, part, dtype)
    with without_autocast(x):
        for rows in parts_of(len(x), max(part[0], 1)):
            x_part = rows_of(x, rows)
            gates, ups = matrices.of(len(x_part), len(w1))
            write_product(gates, x_part, gate.T, gate_bias)
            write_product(ups, x_part, w1.T, bias1)
            _C.gated_hidden(gates, ups, kind, *launch)
            write_product(rows_of(out, rows), ups, w2.T, bias2)
    return out


def gated_mlp_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    bias2: Tensor | None,
    options: MlpOpOptions,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    inputs = (x, w1, w2, gate, bias1, gate_bias, bias2)
    gradients: list[Tensor | None] = [None] * 6
    if any(needed[:6]):
        gradients = _gradients(grad_out, *inputs[:6], options, needed, unrounded)
    dbias2 = grad_out.sum(0) if needed[6] else None  # torch sums 16-bit numbers in float32
    return rounded_gradients((*gradients, dbias2), inputs, needed, unrounded)


def _gradients(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate: Tensor,
    bias1: Tensor | None,
    gate_bias: Tensor | None,
    options: MlpOpOptions,
    needed: list[bool],
    unrounded: bool,
) -> list[Tensor | None]:
    """The gradients of x, w1, w2, gate, bias1 and gate_bias; None where not needed.

    The gradient of x is a sum of two products for each part of units. They are summed in the accumulation
    dtype, unless _adds_rounded.
    """
    grad_out, x, w1, w2, gate, bias1, gate_bias = all_contiguous(grad_out, x, w1, w2, gate, bias1, gate_bias)
    kind, launch, dtype = (
        ACTIVATIONS.index(options.activation),
        launch_on(x),
        hidden_dtype(x.dtype, x.is_cuda),
    )
    part = backward_part(len(x), x.shape[1], len(w1), len(w2), dtype, options.workspace)
    matrices = _Matrices(3, x, part, dtype)
    row_parts, unit_parts = parts_of(len(x), max(part[0], 1)), parts_of(len(w1), max(part[1], 1))
    one_sum = len(unit_parts) == 1 and not unrounded  # dx of a row is complete after one part, then rounded
    dx = None
    if needed[0]:
        dx = empty_dense(x) if one_sum else _sums(x) if unit_parts else accumulator(x)
    dw1, dw2, dgate = (
        Total(weight, len(row_parts)) if wanted else None
        for weight, wanted in zip((w1, w2, gate), needed[1:4], strict=True)
    )
    # Only the gradient of w2 does not need it; the kernel then writes what nobody reads.
    needs_hidden_gradient = any(needed[i] for i in (0, 1, 3, 4, 5))
    dbias1, dgate_bias = new_bias_gradient(bias1, needed[4]), new_bias_gradient(gate_bias, needed[5])
    with without_autocast(x):
        for units in unit_parts:
            w1_part, w2_part, gate_part = rows_of(w1, units), columns_of(w2, units), rows_of(gate, units)
            for rows in row_parts:
                x_part, grad_part = rows_of(x, rows), rows_of(grad_out, rows)
                gates, ups, hidden = matrices.of(len(x_part), len(w1_part))
                write_product(gates, x_part, gate_part.T, None if gate_bias is None else gate_bias[units])
                write_product(ups, x_part, w1_part.T, None if bias1 is None else bias1[units])
                if needs_hidden_gradient:
                    write_product(hidden, grad_part, w2_part)
                _C.gated_gradient(gates, ups, hidden, kind, *launch)
                if dx is not None:
                    dx_part = rows_of(dx, rows)
                    sums = _sums(dx_part) if one_sum and not _adds_rounded(dx_part) else dx_part
                    add_product(sums, gates, gate_part, first=units.start == 0)
                    add_product(sums, ups, w1_part)
                    if sums is not dx_part:
                        dx_part.copy_(sums)
                if dw1 is not None:
                    dw1.add(rows_of(dw1.value, units), ups.T, x_part, first=rows.start == 0)
                if dgate is not None:
                    dgate.add(rows_of(dgate.value, units), gates.T, x_part, first=rows.start == 0)
                if dw2 is not None:
                    dw2.add(columns_of(dw2.value, units), grad_part.T, hidden, first=rows.start == 0)
                for gradient, local in ((dbias1, ups), (dgate_bias, gates)):
                    if gradient is not None:
                        gradient[units] += local.sum(0, dtype=gradient.dtype)
    totals = [None if total is None else total.value for total in (dw1, dw2, dgate)]
    return [dx, *totals, dbias1, dgate_bias]


register(
    "gated_mlp",
    inputs="Tensor x, Tensor w1, Tensor w2, Tensor gate, Tensor? bias1, Tensor? gate_bias, Tensor? bias2",
    options=MlpOpOptions,
    outputs="out",
    differentiable="out",
    residuals="",
    forward=gated_mlp_forward,
    fake=gated_mlp_result,
    backward=gated_mlp_backward,
    fold=Fold(a="x", b="w1", other_a="x", other_b="gate", payload="w2", transposed=True, joined=("bias2",)),
    backward_options=UNROUNDED,
)
