"""An MLP in parts: hidden values are computed and multiplied for one part at a time, to bound their memory.

A part has all hidden units of some rows, or some hidden units of all rows. `multiply_hidden` and
`multiply_hidden_gradients` are for tensor-core kernels: all matrices are 16-bit, sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype, accumulator
from monoidreduce._ops.products import add_product, multipliable, without_autocast, write_product

__all__ = [
    "HiddenPart",
    "Total",
    "columns_of",
    "multiply_hidden",
    "multiply_hidden_gradients",
    "parts_of",
    "rows_of",
]


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


def multiply_hidden(
    store: Callable[[Tensor, Tensor], None],
    rows_at_once: int,
    x: Tensor,
    w2: Tensor,
    bias2: Tensor | None,
    out: Tensor,
) -> None:
    """Writes out = hidden @ w2.T + bias2, for rows_at_once rows at a time.

    store: store(x, hidden) launches the kernel that computes the hidden values of some rows.
    """
    weight = multipliable(w2).T
    workspace = out.new_empty(rows_at_once, weight.shape[0])
    with without_autocast(x):
        for part in parts_of(out.shape[0], rows_at_once):
            hidden, product = workspace[: _size(part)], rows_of(out, part)
            store(rows_of(x, part), hidden)
            write_product(product, hidden, weight, bias2)


class HiddenPart(NamedTuple):
    """The tensor arguments of the kernel that computes hidden values and their gradients for one part.

    out: [rows, units], written: the gradients of the pre-activations, x @ w1.T + bias1.
    hidden: [rows, units], written: the hidden values.
    sums: [rows / 16, units], both sizes rounded up to whole tiles, written: the sum of `out` over each group
        of 16 rows, before it is rounded. None if no bias gradient is needed.
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    bias1: Tensor | None
    grad_out: Tensor
    out: Tensor
    hidden: Tensor
    sums: Tensor | None


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


def multiply_hidden_gradients(
    store: Callable[[HiddenPart], None],
    part: tuple[int, int],
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None,
    needed: list[bool],
) -> list[Tensor | None]:
    """The gradients of x, w1, w2 and bias1; None where not needed.

    store: launches the kernel that writes the results in a HiddenPart. part: (rows, hidden units) of a part.
    """
    grad_out, x, w1 = multipliable(grad_out), multipliable(x), multipliable(w1)
    row_parts, unit_parts = parts_of(x.shape[0], part[0]), parts_of(w1.shape[0], part[1])
    local_workspace, hidden_workspace = x.new_empty(part), x.new_empty(part)
    dx = Total(x, len(unit_parts)) if needed[0] else None
    dw1 = Total(w1, len(row_parts)) if needed[1] else None
    dw2 = Total(w2, len(row_parts)) if needed[2] else None
    dbias1 = x.new_empty(w1.shape[0], dtype=torch.float32) if needed[3] else None
    with without_autocast(x):
        for units in unit_parts:
            w1_part, w2_part = rows_of(w1, units), columns_of(w2, units)
            bias_part = None if bias1 is None else rows_of(bias1, units)
            for rows in row_parts:
                x_part, grad_part = rows_of(x, rows), rows_of(grad_out, rows)
                local, hidden = (
                    columns_of(rows_of(workspace, slice(0, _size(rows))), slice(0, _size(units)))
                    for workspace in (local_workspace, hidden_workspace)
                )
                sums = None if dbias1 is None else _partial_sums(local)
                store(HiddenPart(x_part, w1_part, w2_part, bias_part, grad_part, local, hidden, sums))
                if dx is not None:
                    dx.add(rows_of(dx.value, rows), local, w1_part, first=units.start == 0)
                if dw1 is not None:
                    dw1.add(rows_of(dw1.value, units), local.T, x_part, first=rows.start == 0)
                if dw2 is not None:
                    dw2.add(columns_of(dw2.value, units), grad_part.T, hidden, first=rows.start == 0)
                if dbias1 is not None and sums is not None:
                    sums = sums[: -(-_size(rows) // 16), : _size(units)]
                    if rows.start == 0:
                        torch.sum(sums, 0, out=rows_of(dbias1, units))
                    else:
                        rows_of(dbias1, units).add_(sums.sum(0))
    return [None if total is None else total.value for total in (dx, dw1, dw2)] + [dbias1]


def _partial_sums(local: Tensor) -> Tensor:
    """Memory for HiddenPart.sums: a number for each group of 16 rows and each unit."""
    rows, units = local.shape
    return local.new_empty(16 * -(-rows // 256), 192 * -(-units // 192), dtype=torch.float32)
