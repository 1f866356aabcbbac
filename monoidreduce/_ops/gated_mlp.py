"""The forward and the backward op of the gated MLP (SwiGLU, GeGLU).

torch computes the matrix products, or, of float32 in planes of float16, kernels of this library do
(mlp_planes.py). One elementwise kernel does all that lies between them. Rows or hidden units are processed in
parts, so that hidden values and their gradients fit in the workspace. These have the dtype of x on a GPU, and
the accumulation dtype on the CPU. Operands that are not contiguous are copied: cuBLAS may round the product
of a strided operand differently, and results must not depend on strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    all_contiguous,
    allows_planes,
    cut_to_width,
    empty_dense,
    launch_on,
    new_bias_gradient,
    padded,
    rounded_gradients,
)
from monoidreduce._ops.mlp import (
    ACTIVATIONS,
    MlpOpOptions,
    new_result,
    plan_mlp_backward,
    plan_mlp_forward,
)
from monoidreduce._ops.mlp_parts import Total, columns_of, fitting, parts_of, rows_of
from monoidreduce._ops.mlp_planes import GatedPlaneGradients, GatedPlaneOutput
from monoidreduce._ops.products import add_product, fills_a_gpu, without_autocast, write_product
from monoidreduce._ops.registry import UNROUNDED, Fold, register

__all__ = ["backward_part", "forward_part", "hidden_dtype"]

# Operands of this width or less are multiplied in float32: products of planes are as accurate from 64 terms
# on (kFewestTerms in csrc/plan/tiles.h), and wider operands are padded to as many.
_NARROW = 56


def hidden_dtype(dtype: torch.dtype, on_gpu: bool) -> torch.dtype:
    """The dtype of stored hidden values, for inputs of a dtype."""
    return dtype if on_gpu else accumulation_dtype(dtype)


def forward_part(
    rows: int, units: int, dtype: torch.dtype, workspace: int | None, planes: bool = False
) -> tuple[int, int]:
    """(rows, hidden units) of a part of the forward pass. It has all units, so that each row of the result is
    one product. dtype: of hidden values. planes: hidden values are also held in planes, which take as many
    bytes as float32."""
    return fitting(rows, (3 if planes else 2) * units * dtype.itemsize, workspace), units


def backward_part(
    rows: int,
    width: int,
    units: int,
    outputs: int,
    dtype: torch.dtype,
    workspace: int | None,
    planes: bool = False,
) -> tuple[int, int]:
    """(rows, hidden units) of a part of the backward pass: it has all rows, or all units.

    With parts of units, the gradient of x is read and written again for each part; with parts of rows, the
    gradients of the weights are. The choice is whichever has fewer elements. planes: as in `forward_part`.
    """
    size = (4 if planes else 3) * dtype.itemsize
    if 2 * rows * width <= units * (2 * width + outputs):
        return rows, fitting(units, rows * size, workspace)
    return fitting(rows, units * size, workspace), units


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


def _in_planes(
    plan: Callable[..., _C.Plan],
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    options: MlpOpOptions,
) -> bool:
    """Whether products are of planes: where those of the same MLP without its gate are, unless a width is so
    small that sums are more accurate in float32. plan: of the pass."""
    if not (x.is_cuda and x.dtype == torch.float32 and allows_planes()):
        return False
    narrow = min(x.shape[1], w2.shape[0]) <= _NARROW
    return not narrow and plan(x, w1, w2, bias1, options.workspace).planes


def _readable(
    rows: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], planes: bool
) -> list[Any]:
    """Contiguous operands, in this order. For planes they are aligned, and widths and hidden units padded to
    multiples of 8."""
    if not planes:
        return all_contiguous(*rows, *weights, *biases)
    of_biases = [None if bias is None else padded(bias) for bias in biases]
    return [*map(padded, rows), *(padded(weight, 2) for weight in weights), *of_biases]


class OutputProducts:
    """The products of the forward pass, by torch."""

    def __init__(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        gate: Tensor,
        bias1: Tensor | None,
        gate_bias: Tensor | None,
        bias2: Tensor | None,
    ) -> None:
        self.x, self.w1, self.w2, self.gate = x, w1, w2, gate
        self.bias1, self.gate_bias, self.bias2 = bias1, gate_bias, bias2

    def write_inputs(self, rows: slice, gates: Tensor, ups: Tensor) -> None:
        """gates = x @ gate.T + gate_bias and ups = x @ w1.T + bias1, for some rows."""
        x = rows_of(self.x, rows)
        write_product(gates, x, self.gate.T, self.gate_bias)
        write_product(ups, x, self.w1.T, self.bias1)

    def write_output(self, out: Tensor, hidden: Tensor) -> None:
        """out = hidden @ w2.T + bias2, for some rows."""
        write_product(out, hidden, self.w2.T, self.bias2)


class GatedGradients:
    """The products of the backward pass, by torch.

    needed: of the gradients of x, w1, w2 and gate. parts: the number of parts of rows, and of hidden units.
    unrounded: the gradient of x stays in the accumulation dtype.

    The gradient of x is a sum of two products for each part of units. They are summed in the accumulation
    dtype, unless _adds_rounded.
    """

    def __init__(
        self,
        grad_out: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        gate: Tensor,
        bias1: Tensor | None,
        gate_bias: Tensor | None,
        needed: list[bool],
        parts: tuple[int, int],
        unrounded: bool,
    ) -> None:
        self.grad_out, self.x, self.w1, self.w2, self.gate = grad_out, x, w1, w2, gate
        self.bias1, self.gate_bias = bias1, gate_bias
        of_rows, of_units = parts
        # With one part of units, dx of a row is complete after one part, and is rounded then.
        self.one_sum = of_units == 1 and not unrounded
        self.dx: Tensor | None = None
        if needed[0]:
            self.dx = empty_dense(x) if self.one_sum else _sums(x) if of_units else accumulator(x)
        self.dw1, self.dw2, self.dgate = (
            Total(weight, of_rows) if wanted else None
            for weight, wanted in zip((w1, w2, gate), needed[1:], strict=True)
        )

    def write_inputs(self, rows: slice, units: slice, gates: Tensor, ups: Tensor) -> None:
        """gates = x @ gate.T + gate_bias and ups = x @ w1.T + bias1, for a part."""
        x = rows_of(self.x, rows)
        for out, weight, bias in ((gates, self.gate, self.gate_bias), (ups, self.w1, self.bias1)):
            write_product(out, x, rows_of(weight, units).T, None if bias is None else rows_of(bias, units))

    def write_upstream(self, rows: slice, units: slice, hidden: Tensor) -> None:
        """hidden = grad_out @ w2, the gradient of the hidden values of a part."""
        write_product(hidden, rows_of(self.grad_out, rows), columns_of(self.w2, units))

    def add(self, rows: slice, units: slice, gates: Tensor, ups: Tensor, hidden: Tensor) -> None:
        """Adds the products of a part. gates, ups: their gradients. hidden: the hidden values."""
        x = rows_of(self.x, rows)
        if self.dx is not None:
            dx = rows_of(self.dx, rows)
            sums = _sums(dx) if self.one_sum and not _adds_rounded(dx) else dx
            add_product(sums, gates, rows_of(self.gate, units), first=units.start == 0)
            add_product(sums, ups, rows_of(self.w1, units))
            if sums is not dx:
                dx.copy_(sums)
        first = rows.start == 0
        if self.dw1 is not None:
            self.dw1.add(rows_of(self.dw1.value, units), ups.T, x, first=first)
        if self.dgate is not None:
            self.dgate.add(rows_of(self.dgate.value, units), gates.T, x, first=first)
        if self.dw2 is not None:
            grad_out = rows_of(self.grad_out, rows)
            self.dw2.add(columns_of(self.dw2.value, units), grad_out.T, hidden, first=first)

    def gradients(self) -> list[Tensor | None]:
        """The gradients of x, w1, w2 and gate; None where not needed."""
        totals = (self.dw1, self.dw2, self.dgate)
        return [self.dx, *(None if total is None else total.value for total in totals)]


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
    outputs = w2.shape[0]
    planes = _in_planes(plan_mlp_forward, x, w1, w2, bias1, options)
    x, w1, w2, gate, bias1, gate_bias, bias2 = _readable(
        (x,), (w1, w2, gate), (bias1, gate_bias, bias2), planes
    )
    out = new_result(x, w2, options.unrounded_result)
    kind, launch, dtype = (
        ACTIVATIONS.index(options.activation),
        launch_on(x),
        hidden_dtype(x.dtype, x.is_cuda),
    )
    part = forward_part(len(x), len(w1), dtype, options.workspace, planes)
    operands = (x, w1, w2, gate, bias1, gate_bias, bias2)
    products = GatedPlaneOutput(*operands) if planes else OutputProducts(*operands)
    matrices = _Matrices(2, x, part, dtype)
    with without_autocast(x):
        for rows in parts_of(len(x), max(part[0], 1)):
            gates, ups = matrices.of(rows.stop - rows.start, len(w1))
            products.write_inputs(rows, gates, ups)
            _C.gated_hidden(gates, ups, kind, *launch)
            products.write_output(rows_of(out, rows), ups)
    return out if out.shape[1] == outputs else cut_to_width(outputs, out)


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
    """The gradients of x, w1, w2, gate, bias1 and gate_bias, which may be padded; None where not needed."""
    planes = _in_planes(plan_mlp_backward, x, w1, w2, bias1, options)
    grad_out, x, w1, w2, gate, bias1, gate_bias = _readable(
        (grad_out, x), (w1, w2, gate), (bias1, gate_bias), planes
    )
    kind, launch, dtype = (
        ACTIVATIONS.index(options.activation),
        launch_on(x),
        hidden_dtype(x.dtype, x.is_cuda),
    )
    part = backward_part(len(x), x.shape[1], len(w1), len(w2), dtype, options.workspace, planes)
    row_parts, unit_parts = parts_of(len(x), max(part[0], 1)), parts_of(len(w1), max(part[1], 1))
    operands = (grad_out, x, w1, w2, gate, bias1, gate_bias)
    products = (
        GatedPlaneGradients(*operands, needed[:4])
        if planes
        else GatedGradients(*operands, needed[:4], (len(row_parts), len(unit_parts)), unrounded)
    )
    matrices = _Matrices(3, x, part, dtype)
    # Only the gradient of w2 does not need it; the kernel then writes what nobody reads.
    needs_upstream = any(needed[i] for i in (0, 1, 3, 4, 5))
    dbias1, dgate_bias = new_bias_gradient(bias1, needed[4]), new_bias_gradient(gate_bias, needed[5])
    with without_autocast(x):
        for units in unit_parts:
            for rows in row_parts:
                gates, ups, hidden = matrices.of(rows.stop - rows.start, units.stop - units.start)
                products.write_inputs(rows, units, gates, ups)
                if needs_upstream:
                    products.write_upstream(rows, units, hidden)
                _C.gated_gradient(gates, ups, hidden, kind, *launch)
                products.add(rows, units, gates, ups, hidden)
                for gradient, local in ((dbias1, ups), (dgate_bias, gates)):
                    if gradient is not None:
                        gradient[units] += local.sum(0, dtype=gradient.dtype)
    return [*products.gradients(), dbias1, dgate_bias]


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
