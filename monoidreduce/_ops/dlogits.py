"""The gradients of a linear head by products with dlogits: dX = dlogits @ W and dW = dlogits.T @ X.

dlogits [N, V] are the derivatives of a loss by the dot products of rows X [N, D] and columns W [V, D]; the
theorem and csrc call them local gradients. They never exist whole. A forward pass may have saved those of the
first columns. The others are computed again, for a slice of the columns at a time: in memory of gradients
that are not written yet, or in the workspace (slices.py).

For tensor-core kernels: rows and columns have 16 bits, sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.active_rows import gather_rows, scale_rows
from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.products import add_product, multipliable, write_product
from monoidreduce._ops.slices import TILE_COLUMNS, Needed, Space, slices

__all__ = [
    "UNIT_UPSTREAM",
    "FrozenHead",
    "Head",
    "HeadGradients",
    "HeadSlice",
    "Upstream",
    "multiply_dlogits",
]

# The upstream gradient of dlogits that are multiplied by the real one later. With it float16 is precise for
# probabilities above 5e-7, and holds slopes of a loss up to 500.
UNIT_UPSTREAM = 2.0**7


class HeadSlice(NamedTuple):
    """What the kernel that writes dlogits of a slice of the columns gets of a head.

    rows: [N, D], gathered if rows that do not count are left out.
    columns: [slice, D].
    dlogits: [N, slice], to be written; None if the head has no gradients.
    bias_sums: [N / 16, slice], in whole tiles, to be written: sums of dlogits over 16 rows each, from before
        they are rounded. None if there is no gradient of a bias.
    """

    rows: Tensor
    columns: Tensor
    dlogits: Tensor | None
    bias_sums: Tensor | None


class HeadGradients(NamedTuple):
    """Those that are needed; bias: by a term of each dot product."""

    rows: Tensor | None
    columns: Tensor | None
    bias: Tensor | None


class Upstream(NamedTuple):
    """The upstream gradients of rows, where dlogits are for UNIT_UPSTREAM and products multiply by the real
    ones.

    grad: [N], 0 for rows that do not count.
    slope: d logit / d dot product. Such dlogits are UNIT_UPSTREAM times d loss / d logit.
    uniform: grad is one number for all rows that count. Then all dlogits are for UNIT_UPSTREAM, so that
        rounding them to 16 bits rounds no upstream gradient. Rounding one would be the same error in the
        largest number of each row. If it is not uniform, only saved dlogits are.
    """

    grad: Tensor
    slope: float
    uniform: bool


class _Factors:
    """By what products multiply dlogits that are for UNIT_UPSTREAM.

    grad: [N] in the order of the rows of dlogits.
    unit: what grad is multiplied by.
    by_row: [N], unit * grad.
    uniform: [1], the same for all rows that count; None if they differ.
    """

    def __init__(self, upstream: Upstream, order: Tensor | None) -> None:
        self.unit = upstream.slope / UNIT_UPSTREAM
        self.grad = upstream.grad.contiguous() if order is None else upstream.grad[order[:-1]]
        self.by_row = self.unit * self.grad
        self.uniform = self.by_row[:1] if upstream.uniform else None


class _BiasSums:
    """The sums of dlogits by columns.

    total: [V]. partial: what kernels write for one slice (HeadSlice.bias_sums).
    """

    def __init__(self, head: Head) -> None:
        columns, groups = head.columns, 16 * -(-len(head.rows) // 256)
        self.total = columns.new_empty(len(columns), dtype=torch.float32)
        new = columns.new_empty if head.order is None else columns.new_zeros  # rows left out write nothing
        self.partial = new((groups, head.space.own), dtype=torch.float32)

    def of(self, part: slice) -> Tensor:
        whole_tiles = TILE_COLUMNS * -(-(part.stop - part.start) // TILE_COLUMNS)
        return self.partial[:, :whole_tiles]

    def add_up(self, part: slice) -> None:
        torch.sum(self.partial[:, : part.stop - part.start], 0, out=self.total[part])


class Head:
    """Rows X [N, D] and columns W [V, D], and their gradients by dlogits of a slice of the columns at a time.

        for each slice, the last columns first:
            slice_at(part)          where a kernel finds its operands and writes dlogits
            add_products(part)      dX += dlogits @ W[part]         in float32, rounded once at the end
                                    dW[part] = dlogits.T @ X        written once
                                    db[part] = sums of dlogits
        add_saved_products()        the same of the first columns, whose dlogits were saved

    The saved columns come last because their part of dW, and dX, are memory for the dlogits of all others.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        needed: Needed,
        *,
        clusters: int,
        own_columns: int,
        saved: Tensor | None = None,
        upstream: Upstream | None = None,
        order: Tensor | None = None,
        unrounded: bool = False,
    ) -> None:
        """
        Args:
            rows: [N, D], and columns [V, D].
            needed: which gradients are.
            clusters: the plan's (_C.Plan): kernels of this library multiply. 0: torch does.
            own_columns: for the dlogits of so many columns there is room in the workspace.
            saved: [N, first columns], dlogits that the forward pass saved.
            upstream: saved dlogits are for UNIT_UPSTREAM, perhaps all. None: all dlogits are final.
            order: of the rows of dlogits (order_rows). Rows that do not count are left out. Only with this
                library's products, as `saved`.
            unrounded: the gradient of the rows stays in float32.
        """
        self.rows, self.columns = multipliable(rows), multipliable(columns)
        self.clusters, self.order, self.unrounded = clusters, order, unrounded
        self.saved = rows.new_empty(len(rows), 0) if saved is None else saved
        (count, width), first = columns.shape, self.saved.shape[1]
        computes = first < count  # dlogits that were not saved
        self.gathers = order is not None and computes
        self.d_columns = columns.new_empty(columns.shape) if needed.columns else None
        self.space = space = Space.of(len(rows), count, width, own_columns, first, needed, self.gathers)
        # The memory of dX, in which dlogits or the gathered rows lie until it is written.
        memory = rows.new_empty(rows.shape) if space.has_rows or space.gathers_in_rows else None
        self.room = memory if space.has_rows else None
        self.d_rows = memory if needed.rows else None
        self.row_sums: Tensor | None = None
        if needed.rows and computes:
            self.row_sums = rows.new_zeros(rows.shape, dtype=torch.float32)
        elif needed.rows and unrounded:  # one product: nothing is summed
            self.d_rows = rows.new_empty(rows.shape, dtype=torch.float32)
        self.own: Tensor | None = None
        self.factors = None if upstream is None else _Factors(upstream, order)
        if order is not None and computes:
            gathered = memory if space.gathers_in_rows and memory is not None else torch.empty_like(self.rows)
            self.rows = gather_rows(self.rows, order, gathered)
        self.bias = _BiasSums(self) if needed.bias else None

    def slice_at(self, part: slice) -> HeadSlice:
        bias_sums = None if self.bias is None else self.bias.of(part)
        return HeadSlice(self.rows, self.columns[part], self._dlogits(part), bias_sums)

    def _dlogits(self, part: slice) -> Tensor:
        """Where the dlogits of a slice are computed."""
        rows, count = len(self.rows), part.stop - part.start
        pitch, place = -(-count // 8) * 8, self.space.place(part)
        if place == "own":
            if self.own is None:
                self.own = self.rows.new_empty(rows, self.space.own)
            return self.own[:, :count]
        room = self.room if place == "rows" else self.d_columns
        assert room is not None
        return room.view(-1)[: rows * pitch].view(rows, pitch)[:, :count]

    def add_products(self, part: slice, dlogits: Tensor, columns: Tensor) -> None:
        """Add the products of dlogits that have been computed. columns: [slice, D]."""
        uniform = None if self.factors is None else self.factors.uniform
        if self.row_sums is not None:
            if self.clusters:
                factor = None if self.factors is None or uniform is None else self.factors.by_row
                _rows_product(dlogits, columns, factor, self.row_sums, self.order, True)
            else:
                add_product(self.row_sums, dlogits, columns)
        if self.d_columns is not None:
            if self.clusters:
                _columns_product(dlogits, self.rows, uniform, self.d_columns[part], self.order)
            else:
                write_product(self.d_columns[part], dlogits.T, self.rows)
        if self.bias is not None:
            self.bias.add_up(part)

    def add_saved_products(self) -> None:
        """Add the products of saved dlogits, when all others are added."""
        first = self.saved.shape[1]
        if first == 0:
            return
        if self.d_columns is not None:
            rows, scale = self._rows_for_saved()
            _columns_product(self.saved, rows, scale, self.d_columns[:first], self.order)
        adds = self.row_sums is not None
        sums = self.row_sums if adds else self.d_rows
        if sums is not None:  # last: the rows may lie in the memory of dX
            factor = None if self.factors is None else self.factors.by_row
            _rows_product(self.saved, self.columns[:first], factor, sums, self.order, adds)

    def _rows_for_saved(self) -> tuple[Tensor, Tensor | None]:
        """The rows in the order of saved dlogits, and [1] what the product of both is multiplied by.

        Upstream gradients that differ multiply the rows. float16 ends at 65504, which multiplied rows may
        exceed where their product with dlogits does not. So in float16 a power of two brings the largest
        upstream gradient to between 1/2 and 1. The product is brought back by as much while it is in float32.
        """
        order = None if self.gathers else self.order
        upstream, scale = None, None if self.factors is None else self.factors.uniform
        if scale is None and self.factors is not None:
            upstream = self.factors.grad
            scale = upstream.new_full((1,), self.factors.unit)
            if self.rows.dtype == torch.float16:
                _, exponent = torch.frexp(upstream.abs().amax())
                exponent = exponent.clamp(-126, 126).to(upstream.dtype)
                upstream, scale = torch.ldexp(upstream, -exponent), torch.ldexp(scale, exponent)
        elif order is None:
            return self.rows, scale
        out = self.rows if self.gathers else self.room  # which hold nothing that is read again
        return scale_rows(
            self.rows, upstream, torch.empty_like(self.rows) if out is None else out, order
        ), scale

    def gradients(self) -> HeadGradients:
        """When all products have been added; once."""
        bias = None if self.bias is None else self.bias.total
        if bias is not None and self.factors is not None and self.factors.uniform is not None:
            bias = bias * self.factors.uniform
        return HeadGradients(self._rows_gradient(), self.d_columns, bias)

    def _rows_gradient(self) -> Tensor | None:
        """dX with its rows in the order of X."""
        if self.d_rows is None or self.row_sums is None:
            return self.d_rows
        if self.order is None:
            return self.row_sums if self.unrounded else self.d_rows.copy_(self.row_sums)
        out = torch.empty_like(self.row_sums) if self.unrounded else self.d_rows
        return scale_rows(self.row_sums, None, out, self.order, scatters=True)


class FrozenHead:
    """Rows and columns that dlogits of another head are computed from, and which have no gradients.

    order: as of Head; None too where no dlogits are to be computed.
    """

    def __init__(self, rows: Tensor, columns: Tensor, order: Tensor | None) -> None:
        self.rows = rows if order is None else gather_rows(rows, order, torch.empty_like(rows))
        self.columns = columns

    def slice_at(self, part: slice) -> HeadSlice:
        return HeadSlice(self.rows, self.columns[part], None, None)


def multiply_dlogits(
    heads: Sequence[Head | FrozenHead], store: Callable[[slice, list[HeadSlice]], None]
) -> list[HeadGradients]:
    """The gradients of heads over the same columns; frozen ones, which have none, come last.

    store(part, slices) writes the dlogits of these columns to each head's slice.
    """
    trained = [head for head in heads if isinstance(head, Head)]
    with torch.autocast("cuda", enabled=False):
        for part in slices([head.space for head in trained], trained[0].clusters):
            head_slices = [head.slice_at(part) for head in heads]
            store(part, head_slices)
            for head, head_slice in zip(trained, head_slices, strict=False):
                assert head_slice.dlogits is not None
                head.add_products(part, head_slice.dlogits, head_slice.columns)
        for head in trained:
            head.add_saved_products()
    return [head.gradients() for head in trained]


def _rows_product(
    dlogits: Tensor, columns: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, adds: bool
) -> None:
    """(factor[:, None] * dlogits) @ columns of the rows that count.

    It is added to a float32 out, or written to out[order], with zeros for the other rows.
    """
    _C.rows_product(dlogits, columns, factor, out, order, adds, 1, streams.current(out.device.index))


def _columns_product(
    dlogits: Tensor, rows: Tensor, scale: Tensor | None, out: Tensor, order: Tensor | None
) -> None:
    """out = scale * dlogits.T @ rows over the rows that count."""
    _C.columns_product(dlogits, rows, scale, out, order, 1, streams.current(out.device.index))
