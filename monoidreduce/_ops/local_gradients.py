"""The gradients of the linear losses as products of local gradients, the derivatives by <row, column>.

The forward pass may have kept the local gradients of the first columns, in the workspace. The others are
computed again, as many columns at a time as there is room for. The room is in the gradients, where these
have not been written yet, or in the workspace. For tensor-core kernels: rows and columns are of a 16-bit
type, sums of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.slices import TILE_COLUMNS, Space, slices

__all__ = [
    "UNIT_UPSTREAM",
    "Head",
    "add_product",
    "fills_a_gpu",
    "gather_rows",
    "multipliable",
    "multiply_local_gradients",
    "order_rows",
    "room_to_gather",
    "write_product",
]

# What a forward pass gathers at a time: where all local gradients are kept it adds to the peak of memory. But
# a part ends with some clusters idle. On an H100 (width 4096, 32000 classes) parts of 4864 rows take 36 waves
# of tiles for the work of 35.98. Parts of 4096 rows take 31 waves for the work of 30.3.
_BYTES_OF_GATHERED = 38 << 20
# With so many elements a product has a tile of 128 x 128 for every multiprocessor of the largest GPUs.
_ELEMENTS_OF_A_WHOLE_GPU = 1 << 22
# Local gradients by scores are for this upstream gradient, where a factor makes it the real one later. With
# it float16 is precise for probabilities above 5e-7, and holds slopes of a loss up to 500.
UNIT_UPSTREAM = 2.0**7


def multipliable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy, as torch multiplies it: its strides fit 32 bits."""
    return matrix if matrix.stride(0) < 1 << 31 else matrix.contiguous()


def fills_a_gpu(product: Tensor) -> bool:
    """Whether it has so many elements that cuBLAS does not split it along its sum."""
    return product.numel() >= _ELEMENTS_OF_A_WHOLE_GPU


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """total += a @ b, in total's dtype: from matrices of it, or in float32 from 16-bit ones.

    first: total = a @ b, and what total holds is not read.

    A product of cuBLAS (13.0, on an H100) that is split over multiprocessors along its sum may lose the last
    term. It did for 248 x 264 elements of 25345 terms. There whole eights of terms are one product, and the
    remaining terms another.
    """
    kept = 0 if first else 1  # times total; at 0 torch reads none of it
    if total.dtype == a.dtype or total.is_cpu:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=kept, out=total)
        return
    terms, whole = b.shape[0], b.shape[0] // 8 * 8
    products = [(a, b)]
    if not fills_a_gpu(total) and 0 < whole < terms:
        products = [(a[:, :whole], b[:whole]), (a[:, whole:], b[whole:])]
    for factors in products:
        if hasattr(torch.ops.aten.addmm, "dtype_out"):
            torch.addmm(total, *factors, beta=kept, out_dtype=total.dtype, out=total)
        else:  # torch before 2.8: each product is rounded
            product = torch.mm(*factors)
            total.copy_(product) if kept == 0 else total.add_(product)
        kept = 1


def write_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b + bias, in out's dtype, from matrices of it or of 16 bits.

    torch splits a product of few elements over multiprocessors along its sum. Unless told otherwise it adds
    the parts in 16 bits. See add_product too. On a CPU the product may be NaN beside an infinity in 16 bits.
    """
    apart = out.element_size() == 2 and (out.is_cpu or not fills_a_gpu(out))
    if apart or not out.dtype == a.dtype == b.dtype:
        total = out.new_empty(out.shape, dtype=torch.float32) if apart else out
        if bias is not None:
            total.copy_(bias)
        add_product(total, a, b, first=bias is None)
        if apart:
            out.copy_(total)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def order_rows(rows: Tensor, *, target: Tensor | None, mask: Tensor | None, ignore_index: int = 0) -> Tensor:
    """[N + 1]: the rows that count, then the others; last, how many count, which the host does not know."""
    order = rows.new_empty(len(rows) + 1, dtype=torch.int64)
    stream = streams.current(rows.device.index)
    _C.order_rows(order, target, mask, ignore_index, 1, stream)
    return order


def room_to_gather(*operands: Tensor) -> list[Tensor]:
    """What a forward pass gathers the rows of its operands in, as many at a time as that holds."""
    row_block = 256
    bytes_of_row = sum(rows.element_size() * rows.shape[1] for rows in operands)
    fitting = max(_BYTES_OF_GATHERED // bytes_of_row // row_block, 1) * row_block
    return [rows.new_empty(min(len(rows), fitting), rows.shape[1]) for rows in operands]


def gather_rows(rows: Tensor, order: Tensor, out: Tensor) -> Tensor:
    """out, with the rows in this order, those that do not count as zeros."""
    return _scale_rows(rows, None, out, order)


def _scale_rows(
    rows: Tensor,
    factor: Tensor | None,
    out: Tensor,
    order: Tensor | None,
    *,
    scatters: bool = False,
) -> Tensor:
    """out = factor[:, None] * rows, in one pass, and 0 where factor is: 0 times NaN is NaN.

    factor: if None, 1 for rows that count, else 0. order: that of the factors; rows are taken in it, or put
    into out if it scatters.
    """
    stream = streams.current(rows.device.index)
    _C.scale_rows(rows, factor, out, order, scatters, 1, stream)
    return out


def _rows_product(
    local: Tensor,
    columns: Tensor,
    factor: Tensor | None,
    out: Tensor,
    order: Tensor | None,
    adds: bool,
) -> None:
    """(factor[:, None] * local) @ columns of the rows that count.

    It is added to a float32 out, or written to out[order], with zeros for the other rows.
    """
    _C.rows_product(local, columns, factor, out, order, adds, 1, streams.current(out.device.index))


def _columns_product(
    local: Tensor,
    rows: Tensor,
    scale: Tensor | None,
    out: Tensor,
    order: Tensor | None,
) -> None:
    """out = scale * local.T @ rows over the rows that count."""
    stream = streams.current(out.device.index)
    _C.columns_product(local, rows, scale, out, order, 1, stream)


class Head:
    """A pair of matrices, and the gradients by them and by one number a column: those that are needed.

    They are products of local gradients [rows, columns], of some columns at a time: the last columns first.
    The local gradients that were kept, of the first columns, come at the end. A column's gradient is written
    once, a row's is summed in float32. A number of a column has a sum of local gradients that are not
    rounded: the kernel leaves that of 16 rows.

    The gradients of the kept columns are written last. Where they have room enough for local gradients,
    gathered rows take the place of the rows' gradient.

    own_columns: of so many columns the workspace has room for local gradients (slices.py: Space).
    clusters: the plan's (_C.Plan); 0: torch multiplies, which takes all rows, else this library, which leaves
    out those that do not count.
    kept: local gradients of the first columns, by scores and for UNIT_UPSTREAM; without an upstream, by dot
    products and for the real one. upstream: [rows], the real one, 0 for rows that take no part. uniform: is
    it the same number for all that do. Then local gradients that are computed are to be for UNIT_UPSTREAM
    too: so rounding them to 16 bits rounds no upstream gradient. Rounding one would be the same error in the
    largest local gradient of each row. slope: a score's derivative by its dot product.
    unrounded: is the rows' gradient wanted in float32.
    order: the order of the rows of local gradients (order_rows). Rows that do not count are 0 or not written.
    Where some local gradients are to be computed, `rows` is gathered. Only with Hopper's kernels, as `kept`.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        own_columns: int,
        needed: list[bool],
        clusters: int,
        kept: Tensor | None = None,
        upstream: Tensor | None = None,
        uniform: bool = False,
        slope: float = 1.0,
        order: Tensor | None = None,
        unrounded: bool = False,
    ) -> None:
        self.rows, self.columns = multipliable(rows), multipliable(columns)
        self.clusters, self.order = clusters, order
        self.kept = rows.new_empty(len(rows), 0) if kept is None else kept
        first = self.kept.shape[1]
        whole = first == len(columns)
        self.d_columns = columns.new_empty(columns.shape) if needed[1] else None
        self.gathers = order is not None and not whole
        count, width = columns.shape
        self.space = space = Space.of(len(rows), count, width, own_columns, first, needed, self.gathers)
        room = rows.new_empty(rows.shape) if space.has_rows or space.gathers_in_rows else None
        self.room = room if space.has_rows else None
        self.d_rows = room if needed[0] else None
        self.row_sums: Tensor | None = None
        if needed[0] and not whole:
            self.row_sums = rows.new_zeros(rows.shape, dtype=torch.float32)
        elif needed[0] and unrounded:  # if all is kept nothing is added
            self.d_rows = rows.new_empty(rows.shape, dtype=torch.float32)
        self.own: Tensor | None = None
        self.over = slope / UNIT_UPSTREAM
        self.upstream: Tensor | None = None
        self.factor: Tensor | None = None  # of the products of kept local gradients, by rows
        self.scale: Tensor | None = None  # of all products, if uniform
        if upstream is not None:
            self.upstream = upstream.contiguous() if order is None else upstream[order[:-1]]
            self.factor = self.over * self.upstream
            self.scale = self.factor[:1] if uniform else None
        if order is not None and not whole:
            gathered = room if space.gathers_in_rows and room is not None else torch.empty_like(self.rows)
            self.rows = gather_rows(self.rows, order, gathered)
        self.sums = columns.new_empty(len(columns), dtype=torch.float32) if needed[2] else None
        self.partial_sums = None
        if needed[2]:
            groups = 16 * -(-len(rows) // 256)
            new = rows.new_empty if order is None else rows.new_zeros
            self.partial_sums = new((groups, space.own), dtype=torch.float32)

    def local(self, part: slice) -> Tensor:
        """Where the local gradients of a slice are computed."""
        rows, count = len(self.rows), part.stop - part.start
        pitch, place = -(-count // 8) * 8, self.space.place(part)
        if place == "own":
            if self.own is None:
                self.own = self.rows.new_empty(rows, self.space.own)
            return self.own[:, :count]
        room = self.room if place == "rows" else self.d_columns
        assert room is not None
        return room.view(-1)[: rows * pitch].view(rows, pitch)[:, :count]

    def local_sums(self, part: slice) -> Tensor | None:
        whole_tiles = TILE_COLUMNS * -(-(part.stop - part.start) // TILE_COLUMNS)
        return None if self.partial_sums is None else self.partial_sums[:, :whole_tiles]

    def add_products(self, part: slice) -> None:
        """Add the products of the local gradients that have been computed."""
        local, columns = self.local(part), self.columns[part]
        if self.row_sums is not None:
            if self.clusters:
                factor = None if self.scale is None else self.factor
                _rows_product(local, columns, factor, self.row_sums, self.order, True)
            else:
                add_product(self.row_sums, local, columns)
        if self.d_columns is not None:
            if self.clusters:
                _columns_product(local, self.rows, self.scale, self.d_columns[part], self.order)
            else:
                write_product(self.d_columns[part], local.T, self.rows)
        if self.sums is not None and self.partial_sums is not None:
            torch.sum(self.partial_sums[:, : local.shape[1]], 0, out=self.sums[part])

    def add_kept_products(self) -> None:
        """Add the products of the local gradients that were kept, when all others are added."""
        first = self.space.first
        if first == 0:
            return
        columns, sums = self.columns[:first], self.d_rows if self.row_sums is None else self.row_sums
        if self.d_columns is not None:
            rows, scale = self._factors_of_kept()
            _columns_product(self.kept, rows, scale, self.d_columns[:first], self.order)
        if sums is not None:  # now: their memory may have had the rows
            adds = self.row_sums is not None
            _rows_product(self.kept, columns, self.factor, sums, self.order, adds)

    def _factors_of_kept(self) -> tuple[Tensor, Tensor | None]:
        """The rows in their order, [1] what their product with kept local gradients is multiplied by.

        Where upstream gradients differ they multiply the rows. float16 ends at 65504. The multiplied rows may
        exceed it where their product with local gradients does not. So in float16 a power of two brings the
        largest upstream gradient to between 1/2 and 1. The product is brought back by as much while it is
        in float32.
        """
        order = None if self.gathers else self.order
        upstream, scale = None, self.scale
        if scale is None and self.upstream is not None:
            upstream, scale = self.upstream, self.upstream.new_full((1,), self.over)
            if self.rows.dtype == torch.float16:
                _, exponent = torch.frexp(upstream.abs().amax())
                exponent = exponent.clamp(-126, 126).to(upstream.dtype)
                upstream, scale = torch.ldexp(upstream, -exponent), torch.ldexp(scale, exponent)
        elif order is None:
            return self.rows, scale
        out = self.rows if self.gathers else self.room  # which have nothing to hold now
        return _scale_rows(
            self.rows, upstream, torch.empty_like(self.rows) if out is None else out, order
        ), scale

    def rows_gradient(self, unrounded: bool = False) -> Tensor | None:
        """As the rows lie. Once, when all products have been added. unrounded: in float32."""
        if self.d_rows is None or self.row_sums is None:
            return self.d_rows
        if self.order is None:
            return self.row_sums if unrounded else self.d_rows.copy_(self.row_sums)
        out = torch.empty_like(self.row_sums) if unrounded else self.d_rows
        return _scale_rows(self.row_sums, None, out, self.order, scatters=True)

    def sums_gradient(self) -> Tensor | None:
        """By the numbers of columns, as they enter dot products."""
        return self.sums if self.sums is None or self.scale is None else self.sums * self.scale


def multiply_local_gradients(store: Callable[[slice], None], heads: list[Head]) -> None:
    """store(part) writes the local gradients of these columns to each head's local(part)."""
    with torch.autocast("cuda", enabled=False):
        for part in slices([head.space for head in heads], heads[0].clusters):
            store(part)
            for head in heads:
                head.add_products(part)
        for head in heads:
            head.add_kept_products()
