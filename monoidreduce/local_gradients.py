"""The gradients of the linear losses as products of local gradients, the derivatives by <row, column>.

Those of some columns the forward pass may have kept; the others are computed again, as many columns at a time
as the workspace holds. For tensor-core kernels: rows and columns are of a 16-bit type, sums of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monoidreduce import _C

__all__ = [
    "UNIT_UPSTREAM",
    "Head",
    "add_product",
    "columns_to_keep",
    "gather_rows",
    "multipliable",
    "multiply_local_gradients",
    "order_rows",
    "room_to_gather",
]

_TILE_COLUMNS = 256
# Where not all is kept, so much is left to compute the others in: with less, the sums of the rows' gradient
# are read and written so often that matrix products no longer hide it.
_BYTES_TO_RECOMPUTE_IN = 128 << 20
# What a forward pass gathers at a time: where all local gradients are kept it adds to the peak of memory. But
# a part ends with some clusters idle: on an H100 (width 4096, 32000 classes) parts of 4864 rows take 36 turns
# of tiles for the work of 35.98, parts of 4096 rows 31 for that of 30.3.
_BYTES_OF_GATHERED = 38 << 20
# The upstream gradient that local gradients by scores are for where a factor makes it the real one later:
# float16 is precise for probabilities above 5e-7, and holds slopes of a loss up to 500.
UNIT_UPSTREAM = 2.0**7


def columns_to_keep(rows: int, columns: int, workspace: int, scores: int = 1) -> int:
    """How many columns' local gradients a forward pass keeps, within `workspace` bytes in either pass.

    All, or whole tiles; while it runs the forward pass needs as much for each of the `scores` of an element.
    """
    if rows == 0 or columns == 0:
        return 0
    if 2 * rows * columns * scores <= workspace:
        return columns
    bytes_of_tile = 2 * _TILE_COLUMNS * rows
    fitting = workspace // bytes_of_tile
    left = min(fitting, max(_BYTES_TO_RECOMPUTE_IN // bytes_of_tile, 1))
    return min(fitting - left, fitting // scores) * _TILE_COLUMNS


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


def room_to_gather(*operands: Tensor) -> list[Tensor]:
    """What a forward pass gathers the rows of its operands in, as many at a time as that holds."""
    row_block = 256
    bytes_of_row = sum(rows.element_size() * rows.shape[1] for rows in operands)
    fitting = max(_BYTES_OF_GATHERED // bytes_of_row // row_block, 1) * row_block
    return [rows.new_empty((min(len(rows), fitting), rows.shape[1])) for rows in operands]


def gather_rows(rows: Tensor, order: Tensor) -> Tensor:
    """The rows in this order, those that do not count as zeros."""
    return _scale_rows(rows, None, torch.empty_like(rows), order)


def _scale_rows(
    rows: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, scatters: bool = False
) -> Tensor:
    """out = factor[:, None] * rows, in one pass, and 0 where factor is: 0 times NaN is NaN.

    factor: if None, 1 for rows that count, else 0. order: that of the factors; rows are taken in it, or put
    into out if it scatters.
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
    kept: of the first columns, by scores, for UNIT_UPSTREAM. upstream: [rows], the real one, 0 for rows that
    take no part. uniform: is it the same number for all that do; then those that are computed are to be for
    UNIT_UPSTREAM too, so that rounding them to 16 bits rounds no upstream gradient: that would be the same
    error in the largest of each row. slope: a score's derivative by its dot product.
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
        upstream: Tensor | None = None,
        uniform: bool = False,
        slope: float = 1.0,
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
        self.factor = self.scale = None  # of the products of what is computed: by rows, and of all
        if upstream is not None:
            placed = upstream.contiguous() if order is None else upstream[order[:-1]]
            over = slope / UNIT_UPSTREAM
            if uniform:
                self.factor = over * placed
                self.scale = self.factor[:1]
            if kept is not None and kept.numel():
                self._multiply_kept(kept, placed, over)
        if order is not None and not whole:
            self.rows = gather_rows(self.rows, order)
        new = rows.new_empty if order is None else rows.new_zeros
        self.workspace = new((len(rows), columns_at_once))
        self.sums = columns.new_empty((len(columns),), dtype=torch.float32) if needed[2] else None
        self.partial_sums = None
        if needed[2]:
            groups = 16 * -(-len(rows) // 256)
            self.partial_sums = new((groups, columns_at_once), dtype=torch.float32)

    def _multiply_kept(self, kept: Tensor, upstream: Tensor, over: float) -> None:
        """The products of kept local gradients, their rows multiplied by over * upstream."""
        if self.d_columns is not None:
            room = self.d_rows  # not used yet: this is when memory is short
            if room is None or room.dtype != self.rows.dtype:
                room = torch.empty_like(self.rows)
            if self.scale is None:
                rows, scale = self._scaled_rows(upstream, over, room)
            else:
                rows, scale = self._counted_rows(room), self.scale
            _columns_product(kept, rows, scale, self.d_columns[: self.first], self.order)
            if room is self.d_rows:
                room.zero_()
        if self.d_rows is not None:
            factor = over * upstream if self.factor is None else self.factor
            _rows_product(kept, self.columns[: self.first], factor, self.d_rows, self.order)

    def _counted_rows(self, room: Tensor) -> Tensor:
        """The rows in their order, in `room` where it is one."""
        if self.order is None:
            return self.rows
        return _scale_rows(self.rows, None, room, self.order)

    def _scaled_rows(self, upstream: Tensor, over: float, room: Tensor) -> tuple[Tensor, Tensor]:
        """The rows in their order times upstream, in `room`, and [1] what is left to multiply them by.

        float16 ends at 65504, which upstream times rows may exceed where their product with local gradients
        does not: there the largest is brought to 1, and the product back by as much while it is in float32.
        """
        scale = upstream.new_full((1,), over)
        if self.rows.dtype == torch.float16:
            _, exponent = torch.frexp(upstream.abs().amax())
            exponent = exponent.clamp(-126, 126).to(upstream.dtype)
            upstream, scale = torch.ldexp(upstream, -exponent), torch.ldexp(scale, exponent)
        return _scale_rows(self.rows, upstream, room, self.order), scale

    def rows_gradient(self) -> Tensor | None:
        """As the rows lie. Once, when all products have been added."""
        if self.d_rows is None or self.order is None or self.first == len(self.columns):
            return self.d_rows
        gradient = torch.empty_like(self.d_rows, dtype=self.rows.dtype)
        return _scale_rows(self.d_rows, None, gradient, self.order, scatters=True)

    def sums_gradient(self) -> Tensor | None:
        """By the numbers of columns, as they enter dot products."""
        return self.sums if self.sums is None or self.scale is None else self.sums * self.scale

    def local(self, part: slice) -> Tensor:
        return self.workspace[:, : part.stop - part.start]

    def local_sums(self, part: slice) -> Tensor | None:
        whole_tiles = _TILE_COLUMNS * -(-(part.stop - part.start) // _TILE_COLUMNS)
        return None if self.partial_sums is None else self.partial_sums[:, :whole_tiles]

    def add_products(self, part: slice) -> None:
        local, columns = self.local(part), self.columns[part]
        if self.d_rows is not None:
            if self.hopper:
                _rows_product(local, columns, self.factor, self.d_rows, self.order)
            else:
                add_product(self.d_rows, local, columns)
        if self.d_columns is not None:
            if self.hopper:
                _columns_product(local, self.rows, self.scale, self.d_columns[part], self.order)
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
