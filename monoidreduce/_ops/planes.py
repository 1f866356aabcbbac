"""float32 operands on tensor cores, as two planes of float16 (csrc: ops/planes.h), and linear heads of them.

A row of numbers is scale * (high + low): a power of two, and float16 numbers that have 22 bits together.
Three products of planes make one float32 product. In the products with dlogits, dX = dlogits @ W and
dW = dlogits.T @ X, the scales of W's and X's rows are inside the sums. So dlogits are multiplied by them
before they are split in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.dlogits import (
    BiasSums,
    FrozenHead,
    HeadGradients,
    HeadSlice,
    Upstream,
)
from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.mlp_parts import parts_of
from monoidreduce._ops.slices import TILE_COLUMNS, Needed, Space, columns_at_once, columns_in

__all__ = [
    "FrozenPlaneHead",
    "PlaneHead",
    "plane_dots",
    "plane_product",
    "scales_of",
    "split_columns",
    "split_rows",
]

_STEP = 64  # a plane begins on a multiple of so many elements
_BYTES_OF_DLOGITS = 8  # float32, and the planes of one product's operand


def _plane(width: int) -> int:
    return -(-width // _STEP) * _STEP


def split_rows(x: Tensor, by: Tensor | None = None) -> Tensor:
    """x * by in planes, with a scale for each row.

    x: float32 [N, D], aligned. by: float32 [D], or None. The result is float16 [N, 2 * plane + 8]: the high
    plane, the low one, and the scale, a float32 number in the first two elements of the rest.
    """
    planes = x.new_empty(len(x), 2 * _plane(x.shape[1]) + 8, dtype=torch.float16)
    _C.split_rows(x, by, planes, 1, streams.current(x.device.index))
    return planes


def scales_of(planes: Tensor) -> Tensor:
    """[N], a view: the scales of the rows that split_rows returned."""
    return planes.view(torch.float32)[:, -4]


def split_columns(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """x * by[:, None] in planes [N, 2 * plane], with a scale for each column [D]."""
    rows, width = x.shape
    planes = x.new_empty(rows, 2 * _plane(width), dtype=torch.float16)
    scales = x.new_empty(width)
    _C.split_columns(x, by, torch.zeros_like(scales), planes, scales, 1, streams.current(x.device.index))
    return planes, scales


def plane_product(out: Tensor, a: Tensor, b: Tensor, scales: Tensor | None, adds: bool) -> None:
    """out = a @ b, or out += a @ b. scales: of the columns, where a is from split_columns and transposed."""
    _C.plane_product(a, b, scales, out, adds, 1, streams.current(out.device.index))


def plane_dots(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """out = a @ b.T + bias. a, b: from split_rows."""
    _C.plane_dots(a, b, out, 1, streams.current(out.device.index))
    if bias is not None:
        out.add_(bias)


class PlaneHead:
    """The gradients of float32 rows X [N, D] and columns W [V, D] (as dlogits.Head has those of 16 bits).

    The dlogits of a slice lie in the workspace, in float32 and split for one product at a time. Forward has
    saved those of all columns, or none.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        needed: Needed,
        *,
        clusters: int,
        workspace: int,
        saved: Tensor | None = None,
        upstream: Upstream | None = None,
        column_planes: Tensor | None = None,
        column_sums: Tensor | None = None,
    ) -> None:
        """
        Args:
            rows, columns, needed, clusters, upstream, column_sums: as in dlogits.Head.
            workspace: bytes for dlogits, where they are not saved.
            saved: float32 [N, V], dlogits that the forward pass saved; None, or [N, 0]: it saved none.
            column_planes: split_rows(columns), if the caller has it.
        """
        self.saved = rows.new_empty(len(rows), 0) if saved is None else saved
        (count, width), first = columns.shape, self.saved.shape[1]
        fitting = columns_in(workspace * 2 // _BYTES_OF_DLOGITS, len(rows))
        own = max(columns_at_once(count) if first else fitting, TILE_COLUMNS)
        own = min(own, -(-count // TILE_COLUMNS) * TILE_COLUMNS)
        self.rows, self.columns, self.clusters = rows, columns, clusters
        self.all_planes = column_planes
        self.space = Space(len(rows), count, width, own, first, False, False, False, needed.bias)
        self.adds_columns = column_sums is not None
        self.d_rows = torch.empty_like(rows) if needed.rows else None
        self.d_columns = column_sums
        if needed.columns and column_sums is None:
            self.d_columns = columns.new_empty(columns.shape)
        self.bias = BiasSums(columns, len(rows), own, skips=False) if needed.bias else None
        self.dlogits = None if first else rows.new_empty(len(rows), own)
        self.factors = None if upstream is None else upstream.grad * upstream.unit
        self.row_planes = split_rows(rows)
        self.row_scales: Tensor | None = None
        if self.d_columns is not None:
            scales = scales_of(self.row_planes)
            self.row_scales = scales.contiguous() if self.factors is None else scales * self.factors
        self.column_planes: Tensor | None = None  # of the current slice
        self.begun = False  # whether d_rows has the products of a slice

    def slice_at(self, part: slice) -> HeadSlice:
        columns = self.columns[part]
        self.column_planes = split_rows(columns) if self.all_planes is None else self.all_planes[part]
        dlogits = self.saved[:, part] if self.dlogits is None else self.dlogits[:, : len(columns)]
        bias_sums = None if self.bias is None else self.bias.of(part)
        return HeadSlice(self.rows, columns, dlogits, bias_sums, self.row_planes, self.column_planes)

    def add_products(self, part: slice, dlogits: Tensor, columns: Tensor) -> None:
        """Adds the products with the dlogits of a slice to the gradients."""
        assert self.column_planes is not None
        if self.d_rows is not None:
            by_row = split_rows(dlogits, scales_of(self.column_planes).contiguous())
            if self.factors is not None:
                scales_of(by_row).mul_(self.factors)
            plane_product(self.d_rows, by_row, self.column_planes, None, self.begun)
            self.begun = True
            del by_row
        if self.d_columns is not None:
            assert self.row_scales is not None
            by_column, scales = split_columns(dlogits, self.row_scales)
            plane_product(self.d_columns[part], by_column, self.row_planes, scales, self.adds_columns)
        if self.bias is not None:
            self.bias.add_up(part)

    def gradients(self) -> HeadGradients:
        """The gradients, once all products have been added. Call it once."""
        for part in parts_of(self.saved.shape[1], self.space.own):
            of_slice = self.slice_at(part)
            self.add_products(part, self.saved[:, part], of_slice.columns)
        return HeadGradients(self.d_rows, self.d_columns, None if self.bias is None else self.bias.total)


class FrozenPlaneHead(FrozenHead):
    """A float32 head without gradients (dlogits.FrozenHead)."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        super().__init__(rows, columns, None)
        self.row_planes = split_rows(rows)

    def slice_at(self, part: slice) -> HeadSlice:
        columns = self.columns[part]
        return HeadSlice(self.rows, columns, None, None, self.row_planes, split_rows(columns))
