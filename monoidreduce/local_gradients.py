"""The gradients of the linear losses as products of local gradients, the derivatives by <row, column>.

Those of some columns the forward pass may have kept; the others are computed again, as many columns at a time
as the workspace holds. For tensor-core kernels: rows and columns are of a 16-bit type, sums of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
# Of a gradient in float32 before it is multiplied and rounded.
_BYTES_OF_PRODUCT = 80 << 20


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


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * a @ b, in float32 from 16-bit matrices."""
    product = a.new_empty((len(a), b.shape[1]), dtype=torch.float32)
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        return torch.addmm(product, a, b, out_dtype=torch.float32, beta=0, alpha=alpha, out=product)
    return product.copy_(torch.addmm(b[:1], a, b, beta=0, alpha=alpha))  # torch before 2.8: rounded


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32 from 16-bit matrices."""
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch before 2.8: the product of each chunk is rounded
        total += a @ b


def _parts(matrix: Tensor) -> Iterator[slice]:
    """The rows of which a product is in float32 at a time, before it is multiplied and rounded."""
    count = -(-4 * matrix.numel() // _BYTES_OF_PRODUCT)
    step = -(-len(matrix) // count)
    return (slice(first, first + step) for first in range(0, len(matrix), step))


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


class Head:
    """A pair of matrices, and the gradients by them and by one number a column: those that are needed.

    They are products of local gradients [rows, columns], of which `columns_at_once` are held at a time. A
    column's gradient is written once, a row's is summed in float32. Numbers of columns are sums of local
    gradients that are not rounded yet: the kernel leaves those of 16 rows each.

    kept: of the first columns, and factor: [rows], what they are to be multiplied by, 0 for rows that take no
    part.
    order: that of the rows of local gradients (order_rows), of which those that do not count are 0 or not
    written; where some are to be computed, `rows` is gathered. Products are of all rows: how many count is
    not known where they are launched.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        columns_at_once: int,
        needed: list[bool],
        kept: Tensor | None = None,
        factor: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        self.rows, self.columns = multipliable(rows), multipliable(columns)
        self.order = order
        self.first = 0 if kept is None else kept.shape[1]  # column whose local gradients are not kept
        self.d_columns = columns.new_empty(columns.shape) if needed[1] else None
        self.d_rows = None
        if factor is not None and kept is not None:
            places = None if order is None else order[:-1]
            factor = factor if places is None else factor[places]
            with torch.autocast(rows.device.type, enabled=False):
                if self.d_columns is not None:  # before d_rows is there: this is when memory is short
                    self._multiply_kept(kept, factor, places, self.d_columns[: self.first])
                if needed[0]:
                    self.d_rows = self._product_of_kept(kept, factor)
        elif needed[0]:
            self.d_rows = rows.new_zeros(rows.shape, dtype=torch.float32)
        if order is not None and self.first < len(columns):
            self.rows = gather_rows(self.rows, order)
        new = rows.new_empty if order is None else rows.new_zeros
        self.workspace = new((len(rows), columns_at_once))
        self.sums = columns.new_empty((len(columns),), dtype=torch.float32) if needed[2] else None
        self.partial_sums = None
        if needed[2]:
            groups = 16 * -(-len(rows) // 256)
            self.partial_sums = new((groups, columns_at_once), dtype=torch.float32)

    def _multiply_kept(self, kept: Tensor, factor: Tensor, places: Tensor | None, out: Tensor) -> None:
        """out = kept.T @ (factor[:, None] * rows).

        float16 ends at 65504, which factor times rows may exceed where the product does not: there the
        largest factor is brought to 1, and the product back by as much while it has float32's range.
        """
        if self.rows.dtype == torch.float16:
            _, exponent = torch.frexp(factor.abs().amax())
            exponent = exponent.clamp(-126, 126).to(factor.dtype)
            scaled = _scale_rows(
                self.rows, torch.ldexp(factor, -exponent), torch.empty_like(self.rows), places
            )
            back = torch.ldexp(factor.new_full((), _KEPT_SCALE), exponent)
            for part in _parts(out):
                torch.mul(_product(kept.T[part], scaled, 1 / _KEPT_SCALE), back, out=out[part])
        else:
            scaled = _scale_rows(self.rows, factor * _KEPT_SCALE, torch.empty_like(self.rows), places)
            torch.addmm(out, kept.T, scaled, beta=0, alpha=1 / _KEPT_SCALE, out=out)

    def _product_of_kept(self, kept: Tensor, factor: Tensor) -> Tensor:
        """Rounded where nothing is to be added."""
        whole = self.first == len(self.columns)
        total = self.rows.new_empty(self.rows.shape, dtype=self.rows.dtype if whole else torch.float32)
        for part in _parts(total):
            product = _product(kept[part], self.columns[: self.first])
            if whole and self.order is not None:
                _scale_rows(product, factor[part], total, self.order[:-1][part], scatters=True)
            else:
                _scale_rows(product, factor[part], total[part])
        return total

    def rows_gradient(self) -> Tensor | None:
        """As the rows lie. Once, when all products have been added."""
        if self.d_rows is None or self.order is None or self.first == len(self.columns):
            return self.d_rows
        gradient = torch.empty_like(self.d_rows, dtype=self.rows.dtype)
        return _scale_rows(self.d_rows, _counts(self.order), gradient, self.order[:-1], scatters=True)

    def local(self, part: slice) -> Tensor:
        return self.workspace[:, : part.stop - part.start]

    def local_sums(self, part: slice) -> Tensor | None:
        whole_tiles = _TILE_COLUMNS * -(-(part.stop - part.start) // _TILE_COLUMNS)
        return None if self.partial_sums is None else self.partial_sums[:, :whole_tiles]

    def add_products(self, part: slice) -> None:
        local = self.local(part)
        if self.d_rows is not None:
            add_product(self.d_rows, local, self.columns[part])
        if self.d_columns is not None:
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
