"""The gradients of the linear losses as products of local gradients, the derivatives by <row, column>.

For tensor-core kernels: rows and columns are of a 16-bit type, sums of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Head", "multiply_local_gradients"]


def _multipliable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy, as torch multiplies it: its strides fit 32 bits."""
    return matrix if matrix.stride(0) < 1 << 31 else matrix.contiguous()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32 from 16-bit matrices."""
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch before 2.8: the product of each chunk is rounded
        total += a @ b


class Head:
    """A pair of matrices, and the gradients by them and by one number a column: those that are needed.

    They are products of local gradients [rows, columns], of which `columns_at_once` are held at a time. A
    column's gradient is written once, a row's is summed in float32. Numbers of columns are sums of local
    gradients that are not rounded yet: the kernel leaves those of 16 rows each.
    """

    def __init__(self, rows: Tensor, columns: Tensor, columns_at_once: int, needed: list[bool]) -> None:
        self.rows, self.columns = _multipliable(rows), _multipliable(columns)
        self.workspace = rows.new_empty((len(rows), columns_at_once))
        self.d_rows = rows.new_zeros(rows.shape, dtype=torch.float32) if needed[0] else None
        self.d_columns = columns.new_empty(columns.shape) if needed[1] else None
        self.sums = columns.new_empty((len(columns),), dtype=torch.float32) if needed[2] else None
        self.partial_sums = None
        if needed[2]:
            groups = 16 * -(-len(rows) // 256)
            self.partial_sums = rows.new_empty((groups, columns_at_once), dtype=torch.float32)

    def local(self, part: slice) -> Tensor:
        return self.workspace[:, : part.stop - part.start]

    def local_sums(self, part: slice) -> Tensor | None:
        whole_tiles = 256 * -(-(part.stop - part.start) // 256)
        return None if self.partial_sums is None else self.partial_sums[:, :whole_tiles]

    def add_products(self, part: slice) -> None:
        local = self.local(part)
        if self.d_rows is not None:
            _add_product(self.d_rows, local, self.columns[part])
        if self.d_columns is not None:
            torch.mm(local.T, self.rows, out=self.d_columns[part])
        if self.sums is not None and self.partial_sums is not None:
            torch.sum(self.partial_sums[:, : local.shape[1]], 0, out=self.sums[part])


def multiply_local_gradients(store: Callable[[slice], None], columns: int, heads: list[Head]) -> None:
    """store(part) writes the local gradients of these columns to each head's local(part)."""
    step = heads[0].workspace.shape[1]
    with torch.autocast(heads[0].rows.device.type, enabled=False):
        for first in range(0, columns, step):
            part = slice(first, min(first + step, columns))
            store(part)
            for head in heads:
                head.add_products(part)
