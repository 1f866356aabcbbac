"""The gradients of the linear losses as products of local gradients, the derivatives by <row, column>.

Those of some columns the forward pass may have kept; the others are computed again, as many columns at a time
as the workspace holds. For tensor-core kernels: rows and columns are of a 16-bit type, sums of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from monoidreduce import _C

__all__ = [
    "Head",
    "add_product",
    "columns_to_keep",
    "gather_rows",
    "kept_upstream",
    "multipliable",
    "multiply_local_gradients",
    "order_rows",
    "over_kept_upstream",
]

_TILE_COLUMNS = 256
# Where not all is kept, so much is left to compute the others in: with less, the sums of the rows' gradient
# are read and written so often that matrix products no longer hide it.
_BYTES_TO_RECOMPUTE_IN = 128 << 20
_KEPT_SCALE = 2.0**11


def columns_to_keep(rows: int, columns: int, workspace: int, scores: int = 1) -> int:
    """How many columns' local gradients a forward pass keeps, within `workspace` bytes in either pass.

    All, or whole tiles; while it runs the forward pass needs as much for each of the `scores` of an element.
    """
    if rows == 0 or columns == 0:
        return 0
    bytes_of_tile = 2 * _TILE_COLUMNS * rows
    tiles, fitting = -(-columns // _TILE_COLUMNS), workspace // bytes_of_tile
    if fitting // scores >= tiles:
        return columns
    left = min(fitting, max(_BYTES_TO_RECOMPUTE_IN // bytes_of_tile, 1))
    return min(fitting - left, fitting // scores) * _TILE_COLUMNS


def kept_upstream(scale: float, count: Tensor | None, like: Tensor) -> Tensor:
    """[1]: the upstream gradient that local gradients are kept for, scale / count times a power of two.

    What they are multiplied by when the real one is known then is a power of two, if that is scale / count
    times one: rows multiplied by it are not rounded. A power of two more keeps small gradients above the
    least number of float16. Few operations: what they are for waits for them.
    """
    kept_for = math.frexp(scale)[0] * _KEPT_SCALE
    if count is None:
        return like.new_full((1,), kept_for)
    return kept_for / torch.frexp(count).mantissa.reshape(1)


def over_kept_upstream(slope: float, scale: float, count: Tensor | None) -> Tensor | float:
    """slope / kept_upstream(scale, count)."""
    over = slope / (math.frexp(scale)[0] * _KEPT_SCALE)
    return over if count is None else over * torch.frexp(count).mantissa


def multipliable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy, as torch multiplies it: its strides fit 32 bits."""
    return matrix if matrix.stride(0) < 1 << 31 else matrix.contiguous()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32 from 16-bit matrices."""
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch before 2.8: the product of each chunk is rounded
        total += a @ b


def order_rows(rows: Tensor, *, target: Tensor | None, mask: Tensor | None, ignore_index: int = 0) -> Tensor:
    """[N + 1]: the rows that count, then the others; last, how many count, which the host does not know."""
    order = torch.empty((len(rows) + 1,), dtype=torch.int64, device=rows.device)
    stream = torch._C._cuda_getCurrentRawStream(rows.device.index)
    _C.order_rows(target, mask, order, ignore_index, 1, stream)
    return order


def _counts(order: Tensor) -> Tensor:
    """[N]: 1 where a row counts, 0 for the others, in this order."""
    return (torch.arange(len(order) - 1, device=order.device) < order[-1]).float()


def gather_rows(rows: Tensor, order: Tensor) -> Tensor:
    """The rows in this order, those that do not count as zeros."""
    return _scale_rows(rows, _counts(order), torch.empty_like(rows), order[:-1])


def _scale_rows(
    rows: Tensor, factor: Tensor, out: Tensor, order: Tensor | None = None, scatters: bool = False
) -> Tensor:
    """out = factor[:, None] * rows, in one pass, and 0 where factor is: 0 times NaN is NaN.

    order: the rows are rows[order], or they are written to out[order] if it scatters.
    """
    stream = torch._C._cuda_getCurrentRawStream(rows.device.index)
    _C.scale_rows(rows, factor, out, order, scatters, 1, stream)
    return out


def _rows_product(
    local: Tensor, columns: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None
) -> None:
    """(factor[:, None] * local) @ columns of the rows that count: added to a float32 out, or written to
    out[order]."""
    _C.rows_product(
        local, columns, factor, out, order, 1, torch._C._cuda_getCurrentRawStream(out.device.index)
    )


def _columns_product(
    local: Tensor, rows: Tensor, scale: Tensor | None, out: Tensor, order: Tensor | None
) -> None:
    """out = scale * local.T @ rows over the rows that count."""
    _C.columns_product(
        local, rows, scale, out, order, 1, torch._C._cuda_getCurrentRawStream(out.device.index)
    )


class Head:
    """A pair of matrices, and the gradients by them and by one number a column: those that are needed.

    They are products of local gradients [rows, columns], of which `columns_at_once` are held at a time. A
    column's gradient is written once, a row's is summed in float32. Numbers of columns are sums of local
    gradients that are not rounded yet: the kernel leaves those of 16 rows each.

    hopper: do Hopper's kernels multiply, which leave out rows that do not count, or torch, which takes all.
    kept: of the first columns, and factor: [rows], what they are to be multiplied by, 0 for rows that take no
    part.
    order: that of the rows of local gradients (order_rows), of which those that do not count are 0 or not
    written; where some are to be computed, `rows` is gathered. Only with Hopper's kernels, as what is kept.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        columns_at_once: int,
        needed: list[bool],
        *,
        hopper: bool,
        kept: Tensor | None = None,
        factor: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        self.rows, self.columns = multipliable(rows), multipliable(columns)
        self.hopper, self.order = hopper, order
        self.first = 0 if kept is None else kept.shape[1]  # column whose local gradients are not kept
        self.d_columns = columns.new_empty(columns.shape) if needed[1] else None
        self.d_rows = None
        whole = self.first == len(columns)
        if needed[0]:  # if all is kept nothing is added, and a row is rounded once
            self.d_rows = rows.new_zeros(rows.shape, dtype=rows.dtype if whole else torch.float32)
        if factor is not None and kept is not None:
            self._multiply_kept(kept, factor if order is None else factor[order[:-1]])
        if order is not None and not whole:
            self.rows = gather_rows(self.rows, order)
        new = rows.new_empty if order is None else rows.new_zeros
        self.workspace = new((len(rows), columns_at_once))
        self.sums = columns.new_empty((len(columns),), dtype=torch.float32) if needed[2] else None
        self.partial_sums = None
        if needed[2]:
            groups = 16 * -(-len(rows) // 256)
            self.partial_sums = new((groups, columns_at_once), dtype=torch.float32)

    def _multiply_kept(self, kept: Tensor, factor: Tensor) -> None:
        """The products of kept local gradients, their rows multiplied by the factor.

        float16 ends at 65504, which factor times rows may exceed where the product does not: there the
        largest factor is brought to 1, and the product back by as much while it has float32's range.
        """
        columns = self.columns[: self.first]
        if self.d_columns is not None:
            down, back = factor, None
            if self.rows.dtype == torch.float16:
                _, exponent = torch.frexp(factor.abs().amax())
                exponent = exponent.clamp(-126, 126).to(factor.dtype)
                down, back = torch.ldexp(factor, -exponent), torch.ldexp(factor.new_ones(1), exponent)
            order = None if self.order is None else self.order[:-1]
            room = self.d_rows  # not used yet: this is when memory is short
            if room is None or room.dtype != self.rows.dtype:
                room = torch.empty_like(self.rows)
            scaled = _scale_rows(self.rows, down, room, order)
            _columns_product(kept, scaled, back, self.d_columns[: self.first], self.order)
            if room is self.d_rows:
                room.zero_()
        if self.d_rows is not None:
            _rows_product(kept, columns, factor, self.d_rows, self.order)

    def rows_gradient(self) -> Tensor | None:
        """As the rows lie. Once, when all products have been added."""
        if self.d_rows is None or self.order is None or self.first == len(self.columns):
            return self.d_rows  # already as the rows lie
        gradient = torch.empty_like(self.d_rows, dtype=self.rows.dtype)
        return _scale_rows(self.d_rows, _counts(self.order), gradient, self.order[:-1], scatters=True)

    def local(self, part: slice) -> Tensor:
        return self.workspace[:, : part.stop - part.start]

    def local_sums(self, part: slice) -> Tensor | None:
        whole_tiles = _TILE_COLUMNS * -(-(part.stop - part.start) // _TILE_COLUMNS)
        return None if self.partial_sums is None else self.partial_sums[:, :whole_tiles]

    def add_products(self, part: slice) -> None:
        local, columns = self.local(part), self.columns[part]
        if self.d_rows is not None:
            if self.hopper:
                _rows_product(local, columns, None, self.d_rows, self.order)
            else:
                add_product(self.d_rows, local, columns)
        if self.d_columns is not None:
            if self.hopper:
                _columns_product(local, self.rows, None, self.d_columns[part], self.order)
            else:
                torch.mm(local.T, self.rows, out=self.d_columns[part])
        if self.sums is not None and self.partial_sums is not None:
            torch.sum(self.partial_sums[:, : local.shape[1]], 0, out=self.sums[part])


def multiply_local_gradients(store: Callable[[slice], None], columns: int, heads: list[Head]) -> None:
    """store(part) writes the local gradients of these columns to each head's local(part)."""
    step = max(heads[0].workspace.shape[1], 1)
    with torch.autocast(heads[0].rows.device.type, enabled=False):
        for first in range(heads[0].first, columns, step):
            part = slice(first, min(first + step, columns))
            store(part)
            for head in heads:
                head.add_products(part)
