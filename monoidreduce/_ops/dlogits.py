"""The gradients of a linear head by products with dlogits: dX = dlogits @ W and dW = dlogits.T @ X.

dlogits [N, V] are the derivatives of the loss with respect to the dot products of rows X [N, D] and columns
W [V, D]. (The theorem and csrc call them local gradients.) They never exist all at once. The forward pass may
have saved those of the first columns. The others are recomputed for one slice of columns at a time. A slice
lies in the workspace, or in the memory of a gradient that is not written yet (slices.py).

All this is for tensor-core kernels: X and W are 16-bit, or float32 in planes (planes.py). Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.active_rows import gather_rows, scale_rows
from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.products import SUMS_IN_FLOAT32, add_product, multipliable, write_product
from monoidreduce._ops.slices import TILE_COLUMNS, Needed, Space, leaves_clusters_idle, slices

if TYPE_CHECKING:
    from monoidreduce._ops.planes import PlaneHead

__all__ = [
    "UNIT_UPSTREAM",
    "BiasSums",
    "FrozenHead",
    "Head",
    "HeadGradients",
    "HeadSlice",
    "UniformUpstream",
    "Upstream",
    "multiply_dlogits",
    "unit_of",
]

# A stand-in for the upstream gradient, for dlogits that are stored before the real one is known. The products
# with dlogits then multiply by real / UNIT_UPSTREAM. With this value float16 holds probabilities down to 5e-7
# at full precision, and derivatives of a loss up to 500.
UNIT_UPSTREAM = 2.0**7


class HeadSlice(NamedTuple):
    """A head's operands and results for the kernel that writes the dlogits of one slice of columns.

    rows: [N, D]; only the active rows, gathered, if inactive ones are skipped.
    columns: [slice, D].
    dlogits: [N, slice], written by the kernel; None if the head has no gradients.
    bias_sums: [N / 16, slice], both sizes rounded up to whole tiles, written by the kernel: the sum of
        dlogits over each group of 16 rows, before dlogits are rounded to 16 bits. None if no bias gradient is
        needed.
    row_planes, column_planes: rows and columns in planes, if they are float32 (planes.split_rows).
    """

    rows: Tensor
    columns: Tensor
    dlogits: Tensor | None
    bias_sums: Tensor | None
    row_planes: Tensor | None = None
    column_planes: Tensor | None = None


class HeadGradients(NamedTuple):
    """The gradients of a head; None where one is not needed.

    bias: [V], the gradient with respect to a number added to the dot products of a column.
    """

    rows: Tensor | None
    columns: Tensor | None
    bias: Tensor | None


class Upstream(NamedTuple):
    """The upstream gradients of the rows' losses, for dlogits that were stored with UNIT_UPSTREAM instead.

    Those dlogits are UNIT_UPSTREAM * d loss / d logit, and the products multiply by grad * unit.

    grad: [N], 0 for inactive rows.
    unit: slope / UNIT_UPSTREAM. slope: d logit / d dot product.
    """

    grad: Tensor
    unit: float


class UniformUpstream(NamedTuple):
    """The same for a mean or a sum.

    Then all dlogits use UNIT_UPSTREAM, saved or not: the upstream gradient multiplies float32 sums and is not
    rounded to 16 bits with each dlogit. Beside an `Upstream` only saved dlogits use it.

    by_row: [N], grad * unit, the same number for all rows; 0 for inactive rows that are not skipped.
    of_sums: [1], that number, for sums over rows; it may be 0 if no row is active.
    """

    by_row: Tensor
    of_sums: Tensor


def unit_of(slope: float) -> float:
    """The number that turns a row's upstream gradient into the factor of its products.

    It is for dlogits that were stored with UNIT_UPSTREAM in place of the real upstream gradient. slope:
    d logit / d dot product.
    """
    return slope / UNIT_UPSTREAM


class _Factors:
    """The factors by which products multiply dlogits that were stored with UNIT_UPSTREAM.

    by_row: [N], in the order of the rows of dlogits.
    uniform: [1], the factor of all rows; None if it differs between rows.
    grad: of an `Upstream`, in that order; None beside a uniform factor.
    unit: of an `Upstream`.
    """

    def __init__(self, upstream: Upstream | UniformUpstream, order: Tensor | None) -> None:
        self.uniform: Tensor | None = None
        self.grad: Tensor | None = None
        if isinstance(upstream, UniformUpstream):
            self.by_row, self.uniform = upstream
            return
        self.unit = upstream.unit
        self.grad = upstream.grad.contiguous() if order is None else upstream.grad[order[:-1]]
        self.by_row = self.unit * self.grad


class BiasSums:
    """The gradient of a bias: the sum of dlogits over rows.

    total: [V]. partial: the sums over 16 rows each, which kernels write for one slice (HeadSlice.bias_sums).
    """

    def __init__(self, columns: Tensor, rows: int, own: int, skips: bool) -> None:
        """own: the most columns of a slice. skips: kernels skip some rows, and write nothing for them."""
        self.total = columns.new_empty(columns.shape[0], dtype=torch.float32)
        new = columns.new_zeros if skips else columns.new_empty
        self.partial = new((16 * -(-rows // 256), own), dtype=torch.float32)

    def of(self, part: slice) -> Tensor:
        whole_tiles = TILE_COLUMNS * -(-(part.stop - part.start) // TILE_COLUMNS)
        return self.partial[:, :whole_tiles]

    def add_up(self, part: slice) -> None:
        torch.sum(self.partial[:, : part.stop - part.start], 0, out=self.total[part])


class Head:
    """The gradients of rows X [N, D] and columns W [V, D], computed for one slice of columns after the other.

        for each slice, the last columns first:
            slice_at(part)          returns the operands, and where a kernel writes the slice's dlogits
            add_products(part)      dX += dlogits @ W[part]         in float32, rounded once at the end
                                    dW[part] = dlogits.T @ X        written once, or added to `column_sums`
                                    db[part] = sum of dlogits over rows
        gradients()                 does the same for the first columns, whose dlogits forward saved

    The saved columns come last, because until then dX and their part of dW hold other columns' dlogits.
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
        upstream: Upstream | UniformUpstream | None = None,
        order: Tensor | None = None,
        unrounded: bool = False,
        column_sums: Tensor | None = None,
    ) -> None:
        """
        Args:
            rows: [N, D].
            columns: [V, D].
            needed: which gradients are needed.
            clusters: `clusters` of the plan, if this library's kernels compute the products; 0: torch does.
            own_columns: the number of columns whose dlogits fit in the workspace.
            saved: [N, first columns], dlogits that the forward pass saved. Needs clusters > 0.
            upstream: given if saved dlogits, perhaps all dlogits, were stored with UNIT_UPSTREAM. None: all
                dlogits have the real upstream gradient in them.
            order: from order_rows. The rows of dlogits are in this order, and inactive rows are skipped.
                Needs clusters > 0.
            unrounded: return dX in float32.
            column_sums: float32 [V, D], to which dW is added, unrounded; then dW is needed. Dlogits do not
                lie in its memory.
        """
        self.rows, self.columns = multipliable(rows), multipliable(columns)
        self.clusters, self.order, self.unrounded = clusters, order, unrounded
        # torch trusts cuBLAS in the deterministic mode only with a setting, which the kernel does not need.
        trusted = SUMS_IN_FLOAT32 and not torch.are_deterministic_algorithms_enabled()
        idle = trusted and leaves_clusters_idle(rows.shape[0], rows.shape[1], clusters)
        self.rows_by_torch = clusters == 0 or idle
        self.saved = rows.new_empty(rows.shape[0], 0) if saved is None else saved
        (count, width), first = columns.shape, self.saved.shape[1]
        computes = first < count  # whether some dlogits were not saved
        self.gathers = order is not None and computes
        self.adds_columns = column_sums is not None
        self.d_columns = column_sums
        if column_sums is not None:
            needed = needed._replace(columns=False)  # there is no memory that is not written yet
        elif needed.columns:
            self.d_columns = columns.new_empty(columns.shape)
        self.space = space = Space.of(rows.shape[0], count, width, own_columns, first, needed, self.gathers)
        # The memory of dX. Until dX is written, it holds dlogits or the gathered rows.
        memory = rows.new_empty(rows.shape) if space.has_rows or space.gathers_in_rows else None
        self.room = memory if space.has_rows else None
        self.d_rows = memory if needed.rows else None
        self.row_sums: Tensor | None = None
        self.begun = False  # whether torch has written row_sums
        if needed.rows and self.rows_by_torch:
            self.row_sums = rows.new_empty(rows.shape, dtype=torch.float32)
        elif needed.rows and computes:
            self.row_sums = rows.new_zeros(rows.shape, dtype=torch.float32)
        elif needed.rows and unrounded:  # all dlogits were saved, so dX is one product
            self.d_rows = rows.new_empty(rows.shape, dtype=torch.float32)
        self.own: Tensor | None = None
        self.factors = None if upstream is None else _Factors(upstream, order)
        # torch's products have no factors. If all dlogits have the same ones, the sum is multiplied by them.
        self.factor_of_sums: Tensor | None = None
        if self.rows_by_torch and self.factors is not None:
            alike = self.factors.uniform is not None or not computes
            self.factor_of_sums = self.factors.by_row if alike else None
        if order is not None and computes:
            gathered = memory if space.gathers_in_rows and memory is not None else torch.empty_like(self.rows)
            self.rows = gather_rows(self.rows, order, gathered)
        self.bias = BiasSums(columns, rows.shape[0], space.own, order is not None) if needed.bias else None

    def slice_at(self, part: slice) -> HeadSlice:
        bias_sums = None if self.bias is None else self.bias.of(part)
        return HeadSlice(self.rows, self.columns[part], self._dlogits(part), bias_sums)

    def _dlogits(self, part: slice) -> Tensor:
        """The memory for the dlogits of a slice."""
        rows, count = self.rows.shape[0], part.stop - part.start
        pitch, place = -(-count // 8) * 8, self.space.place(part)
        if place == "own":
            if self.own is None:
                self.own = self.rows.new_empty(rows, self.space.own)
            return self.own[:, :count]
        room = self.room if place == "rows" else self.d_columns
        assert room is not None
        return room.view(-1)[: rows * pitch].view(rows, pitch)[:, :count]

    def add_products(self, part: slice, dlogits: Tensor, columns: Tensor) -> None:
        """Adds the products with the dlogits of a slice to the gradients. columns: [slice, D]."""
        uniform = None if self.factors is None else self.factors.uniform
        if self.row_sums is not None and self.rows_by_torch:
            self._add_rows_product(dlogits, columns)
        elif self.row_sums is not None:
            factor = None if self.factors is None or uniform is None else self.factors.by_row
            _rows_product(dlogits, columns, factor, self.row_sums, self.order, True)
        if self.d_columns is not None:
            if self.clusters:
                _columns_product(dlogits, self.rows, uniform, self.d_columns[part], self.order)
            elif self.adds_columns:
                add_product(self.d_columns[part], dlogits.T, self.rows)
            else:
                write_product(self.d_columns[part], dlogits.T, self.rows)
        if self.bias is not None:
            self.bias.add_up(part)

    def _add_rows_product(self, dlogits: Tensor, columns: Tensor) -> None:
        """row_sums += dlogits @ columns, by torch. Rows that are not active may get anything."""
        assert self.row_sums is not None
        add_product(self.row_sums, dlogits, columns, first=not self.begun)
        self.begun = True

    def _add_saved_products(self) -> None:
        """Adds the products with saved dlogits to the gradients, after all add_products."""
        first = self.saved.shape[1]
        if first == 0:
            return
        if self.d_columns is not None:
            rows, scale = self._rows_for_saved()
            _columns_product(self.saved, rows, scale, self.d_columns[:first], self.order)
        # After dW: the gathered rows, its operand, may lie in the memory of dX.
        factor = None if self.factors is None else self.factors.by_row
        adds = self.row_sums is not None
        sums = self.row_sums if adds else self.d_rows
        if self.row_sums is not None and self.rows_by_torch and factor is self.factor_of_sums:
            self._add_rows_product(self.saved, self.columns[:first])
        elif sums is not None:
            _rows_product(self.saved, self.columns[:first], factor, sums, self.order, adds)

    def _rows_for_saved(self) -> tuple[Tensor, Tensor | None]:
        """X for the product saved.T @ X, in the order of saved dlogits; and the factor [1] of the product.

        If upstream gradients differ between rows, they multiply the rows of X. In float16 that could exceed
        65504 even if the product does not. So they are first divided by the power of two that brings the
        largest one to between 1/2 and 1, and the factor, applied in float32, multiplies by it again.
        """
        order = None if self.gathers else self.order
        upstream, scale = None, None if self.factors is None else self.factors.uniform
        if self.factors is not None and self.factors.grad is not None:
            upstream = self.factors.grad
            scale = upstream.new_full((1,), self.factors.unit)
            if self.rows.dtype == torch.float16:
                _, exponent = torch.frexp(upstream.abs().amax())
                exponent = exponent.clamp(-126, 126).to(upstream.dtype)
                upstream, scale = torch.ldexp(upstream, -exponent), torch.ldexp(scale, exponent)
        elif order is None:
            return self.rows, scale
        out = self.rows if self.gathers else self.room  # neither is read again
        return scale_rows(
            self.rows, upstream, torch.empty_like(self.rows) if out is None else out, order
        ), scale

    def gradients(self) -> HeadGradients:
        """The gradients, once all products have been added. Call it once."""
        self._add_saved_products()
        bias = None if self.bias is None else self.bias.total
        if bias is not None and self.factors is not None and self.factors.uniform is not None:
            bias = bias * self.factors.uniform
            if self.order is not None:  # without an active row it is 0, whatever the upstream gradient is
                bias = torch.where(self.order[-1] > 0, bias, 0)
        return HeadGradients(self._rows_gradient(), self.d_columns, bias)

    def _rows_gradient(self) -> Tensor | None:
        """dX, with its rows scattered back to the order of X."""
        if self.d_rows is None or self.row_sums is None:
            return self.d_rows
        factor, scatters = self.factor_of_sums, self.order is not None
        if factor is None and not scatters:
            return self.row_sums if self.unrounded else self.d_rows.copy_(self.row_sums)
        out = self.d_rows
        if self.unrounded:
            out = torch.empty_like(self.row_sums) if scatters else self.row_sums
        return scale_rows(self.row_sums, factor, out, self.order, scatters=scatters)


class FrozenHead:
    """A head without gradients, which the dlogits of another head depend on: a frozen teacher's.

    order: as in Head; None also if no dlogits are left to compute.
    """

    def __init__(self, rows: Tensor, columns: Tensor, order: Tensor | None) -> None:
        self.rows = rows if order is None else gather_rows(rows, order, torch.empty_like(rows))
        self.columns = columns

    def slice_at(self, part: slice) -> HeadSlice:
        return HeadSlice(self.rows, self.columns[part], None, None)


def multiply_dlogits(
    heads: Sequence[Head | PlaneHead | FrozenHead], store: Callable[[slice, list[HeadSlice]], None]
) -> list[HeadGradients]:
    """The gradients of one head, or of a student's and a teacher's head over the same classes.

    heads: the first has gradients; a FrozenHead, which has none, comes last.
    store: store(part, slices) launches the kernel that writes the dlogits of columns `part` for each head.
    """
    trained = [head for head in heads if not isinstance(head, FrozenHead)]
    with torch.autocast("cuda", enabled=False):
        for part in slices([head.space for head in trained], trained[0].clusters):
            head_slices = [head.slice_at(part) for head in heads]
            store(part, head_slices)
            operands = [(of.dlogits, of.columns) for of in head_slices[: len(trained)]]
            del head_slices  # and with them planes, which only `store` reads
            for head, (dlogits, columns) in zip(trained, operands, strict=True):
                assert dlogits is not None
                head.add_products(part, dlogits, columns)
        return [head.gradients() for head in trained]


def _rows_product(
    dlogits: Tensor, columns: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, adds: bool
) -> None:
    """(factor[:, None] * dlogits) @ columns, for active rows.

    adds: the product is added to out, which is float32. Otherwise it is written to out[order], with 0 in the
    other rows.
    """
    _C.rows_product(dlogits, columns, factor, out, order, adds, 1, streams.current(out.device.index))


def _columns_product(
    dlogits: Tensor, rows: Tensor, scale: Tensor | None, out: Tensor, order: Tensor | None
) -> None:
    """out = scale * dlogits.T @ rows, summed over active rows. A float32 out is added to."""
    _C.columns_product(dlogits, rows, scale, out, order, 1, streams.current(out.device.index))
