"""An MLP in parts: hidden values are computed and multiplied for one part at a time, to bound their memory.

A part has some rows and some hidden units. Where torch multiplies, a part has all hidden units in the forward
pass, and in the backward pass all rows or all hidden units. `multiply_hidden` and `multiply_hidden_gradients`
leave hidden values to a function, which launches a tensor-core kernel or calls torch (mlp_by_torch.py). They
leave the products of a part to an object: torch multiplies 16-bit matrices into float32 sums, or float32
matrices (`OutputProduct`, `GradientProducts`); kernels of this library multiply float32 matrices in planes
(mlp_planes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype, accumulator
from monoidreduce._ops.products import add_product, multipliable, without_autocast, write_product
from monoidreduce.workspace import get_workspace

if TYPE_CHECKING:
    from monoidreduce._ops.mlp_planes import PlaneGradients, PlaneOutput

__all__ = [
    "GradientProducts",
    "HiddenPart",
    "OutputProduct",
    "Total",
    "columns_of",
    "fitting",
    "multiply_hidden",
    "multiply_hidden_gradients",
    "parts_of",
    "rows_of",
]


_TILE = 128  # the number of rows, or hidden units, of a part of `fitting` is a multiple of this


def fitting(count: int, bytes_of_each: int, workspace: int | None) -> int:
    """The number of rows, or hidden units, of a part: as few parts as the workspace allows, about equal.

    At least _TILE, or all, even if the workspace does not hold them. Sizes are rounded up to 1024, if
    possible, because 1024 x 4096 elements are a wave of tiles on an H100. For SwiGLU of Llama 3 8B the
    gradient of a weight takes 14 waves in parts of 4096 units, but 16 in parts of 3584.
    """
    workspace = get_workspace() if workspace is None else workspace
    most = max(workspace // max(bytes_of_each, 1) // _TILE, 1) * _TILE
    even = -(-count // max(-(-count // most), 1))
    rounded_up = (-(-even // step) * step for step in (1024, 512, 256, _TILE))
    return min(count, next(size for size in rounded_up if size <= most))


def parts_of(count: int, at_once: int) -> list[slice]:
    return [slice(first, min(first + at_once, count)) for first in range(0, count, at_once)]


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size


def rows_of(matrix: Tensor, part: slice) -> Tensor:
    """The rows of a part. If these are all rows, it is the matrix itself: making a view takes as much host
    time as a launch."""
    return matrix if _size(part) == matrix.shape[0] else matrix[part]


def columns_of(matrix: Tensor, part: slice) -> Tensor:
    return matrix if _size(part) == matrix.shape[1] else matrix[:, part]


def _corner(workspace: Tensor, rows: slice, units: slice) -> Tensor:
    """The memory of a part, which may be smaller than others."""
    return columns_of(rows_of(workspace, slice(0, _size(rows))), slice(0, _size(units)))


class OutputProduct:
    """out = hidden @ w2.T + bias2, by torch."""

    def __init__(self, w2: Tensor, bias2: Tensor | None) -> None:
        self.weight, self.bias2 = multipliable(w2).T, bias2

    def planes_of(self, rows: slice, units: slice) -> tuple[None, None]:
        return None, None

    def add(self, out: Tensor, hidden: Tensor, units: slice) -> None:
        """Writes the output of some rows. units: all of them."""
        write_product(out, hidden, self.weight, self.bias2)


def multiply_hidden(
    store: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None], None],
    part: tuple[int, int],
    x: Tensor,
    w1: Tensor,
    bias1: Tensor | None,
    product: OutputProduct | PlaneOutput,
    out: Tensor,
) -> None:
    """Writes the output of all rows.

    store: store(x, w1, bias1, hidden, row_planes, column_planes) computes the hidden values of a part; the
        last two are x and w1 in planes, or None. part: (rows, hidden units) of a part.
    """
    workspace = out.new_empty(part)
    with without_autocast(x):
        for units in parts_of(w1.shape[0], part[1]):
            w1_part, bias_part = rows_of(w1, units), None if bias1 is None else rows_of(bias1, units)
            for rows in parts_of(out.shape[0], part[0]):
                hidden = _corner(workspace, rows, units)
                planes = product.planes_of(rows, units)
                store(rows_of(x, rows), w1_part, bias_part, hidden, *planes)
                product.add(rows_of(out, rows), hidden, units)


class HiddenPart(NamedTuple):
    """Operands and results of a kernel, or of torch, that computes hidden values and their gradients.

    out: [rows, units], written: the gradients of the pre-activations, x @ w1.T + bias1.
    hidden: [rows, units], written: the hidden values.
    sums: [rows / 16, units], rows rounded up to a multiple of 256 and units of 192, written: the sum of `out`
        over each group of 16 rows, before it is rounded. None if nobody asks for them.
    row_planes, column_planes, other_row_planes, other_column_planes: x, w1, grad_out and w2.T in planes
        (planes.split_rows); None if the kernel does not read planes.
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    bias1: Tensor | None
    grad_out: Tensor
    out: Tensor
    hidden: Tensor
    sums: Tensor | None
    row_planes: Tensor | None
    column_planes: Tensor | None
    other_row_planes: Tensor | None
    other_column_planes: Tensor | None


class Total:
    """The gradient of a matrix, a sum of `products` matrix products.

    value: the gradient. It has the accumulation dtype, or the matrix's own dtype if there is only one product
    to write.
    """

    def __init__(self, of: Tensor, products: int) -> None:
        self.summed = products != 1
        dtype = accumulation_dtype(of.dtype) if self.summed else of.dtype
        self.value = of.new_empty(of.shape, dtype=dtype) if products else accumulator(of)

    def add(self, to: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
        """Adds a @ b to `to`, a view of the value. first: it is the first product, so what was there is not
        read."""
        if self.summed:
            add_product(to, a, b, first=first)
        else:
            write_product(to, a, b)


class GradientProducts:
    """The gradients of x, w1 and w2 (those that are needed), by torch.

    part: (rows, hidden units) of a part.
    """

    def __init__(
        self,
        grad_out: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        needed: Sequence[bool],
        part: tuple[int, int],
    ) -> None:
        row_parts, unit_parts = len(parts_of(x.shape[0], part[0])), len(parts_of(w1.shape[0], part[1]))
        self.grad_out, self.x, self.w1 = multipliable(grad_out), multipliable(x), multipliable(w1)
        self.dx = Total(x, unit_parts) if needed[0] else None
        self.dw1 = Total(w1, row_parts) if needed[1] else None
        self.dw2 = Total(w2, row_parts) if needed[2] else None

    def planes_of(self, rows: slice, units: slice) -> tuple[None, None, None, None]:
        return None, None, None, None

    def add(self, rows: slice, units: slice, local: Tensor, hidden: Tensor) -> None:
        """Adds the products of a part. local: the gradients of its pre-activations (HiddenPart.out)."""
        if self.dx is not None:
            self.dx.add(rows_of(self.dx.value, rows), local, rows_of(self.w1, units), first=units.start == 0)
        if self.dw1 is not None:
            self.dw1.add(
                rows_of(self.dw1.value, units), local.T, rows_of(self.x, rows), first=rows.start == 0
            )
        if self.dw2 is not None:
            grad_out = rows_of(self.grad_out, rows)
            self.dw2.add(columns_of(self.dw2.value, units), grad_out.T, hidden, first=rows.start == 0)

    def gradients(self) -> list[Tensor | None]:
        return [None if total is None else total.value for total in (self.dx, self.dw1, self.dw2)]


def multiply_hidden_gradients(
    store: Callable[[HiddenPart], None],
    part: tuple[int, int],
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    products: GradientProducts | PlaneGradients,
    of_bias: bool,
    sums_of_groups: bool = True,
) -> list[Tensor | None]:
    """The gradients of x, w1, w2 and bias1; None where not needed.

    store: writes the results in a HiddenPart. part: (rows, hidden units) of a part. products: of the
    gradients of x, w1 and w2. of_bias: whether that of bias1 is needed. sums_of_groups: whether `store`
    writes the sums for it; otherwise torch sums the stored gradients.
    """
    local_workspace, hidden_workspace = x.new_empty(part), x.new_empty(part)
    dbias1 = x.new_empty(w1.shape[0], dtype=torch.float32) if of_bias else None
    with without_autocast(x):
        for units in parts_of(w1.shape[0], part[1]):
            w1_part, w2_part = rows_of(w1, units), columns_of(w2, units)
            bias_part = None if bias1 is None else rows_of(bias1, units)
            for rows in parts_of(x.shape[0], part[0]):
                local, hidden = (_corner(of, rows, units) for of in (local_workspace, hidden_workspace))
                sums = _partial_sums(local) if of_bias and sums_of_groups else None
                x_part, grad_part = rows_of(x, rows), rows_of(grad_out, rows)
                operands = (x_part, w1_part, w2_part, bias_part, grad_part)
                store(HiddenPart(*operands, local, hidden, sums, *products.planes_of(rows, units)))
                products.add(rows, units, local, hidden)
                if dbias1 is not None:
                    addends = local if sums is None else sums[: -(-_size(rows) // 16), : _size(units)]
                    if rows.start == 0:
                        torch.sum(addends, 0, out=rows_of(dbias1, units))
                    else:
                        rows_of(dbias1, units).add_(addends.sum(0))
    return [*products.gradients(), dbias1]


def _partial_sums(local: Tensor) -> Tensor:
    """Memory for HiddenPart.sums: a number for each group of 16 rows and each unit."""
    rows, units = local.shape
    return local.new_empty(16 * -(-rows // 256), 192 * -(-units // 192), dtype=torch.float32)
