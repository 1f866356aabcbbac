"""Rows that count, and rows that do not: ignored or masked tokens, which kernels for Hopper leave out.

A kernel lists the rows that count and counts them, on the device. Rows are gathered in that order into a
copy, and kernels read the count, so the host never waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, streams

__all__ = ["gather_rows", "new_gather_buffers", "order_rows", "scale_rows"]

# What a forward pass gathers at a time: where all dlogits are saved it adds to the peak of memory. But
# a part ends with some clusters idle. On an H100 (width 4096, 32000 classes) parts of 4864 rows take 36 waves
# of tiles for the work of 35.98. Parts of 4096 rows take 31 waves for the work of 30.3.
_GATHER_BUFFER_BYTES = 38 << 20


def order_rows(
    rows: Tensor, *, target: Tensor | None = None, mask: Tensor | None = None, ignore_index: int = 0
) -> Tensor:
    """[N + 1]: the indices of rows that count, then of the others; last, how many count.

    A row counts if the mask has it, or if its target is not ignore_index.
    """
    order = rows.new_empty(len(rows) + 1, dtype=torch.int64)
    _C.order_rows(order, target, mask, ignore_index, 1, streams.current(rows.device.index))
    return order


def new_gather_buffers(*operands: Tensor) -> list[Tensor]:
    """For each operand memory for some of its rows, which a forward pass gathers and folds at a time."""
    row_block = 256
    bytes_of_row = sum(rows.element_size() * rows.shape[1] for rows in operands)
    fitting = max(_GATHER_BUFFER_BYTES // bytes_of_row // row_block, 1) * row_block
    return [rows.new_empty(min(len(rows), fitting), rows.shape[1]) for rows in operands]


def gather_rows(rows: Tensor, order: Tensor, out: Tensor) -> Tensor:
    """out = the rows in this order, with zeros for those that do not count."""
    return scale_rows(rows, None, out, order)


def scale_rows(
    rows: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, *, scatters: bool = False
) -> Tensor:
    """out = factor[:, None] * rows, in one pass, and 0 where the factor is 0: 0 times NaN is NaN.

    factor: None is 1 for rows that count, 0 for others. order: of the factors. The rows are taken in that
    order; with `scatters` they have it, and are put back where they belong.
    """
    _C.scale_rows(rows, factor, out, order, scatters, 1, streams.current(rows.device.index))
    return out
