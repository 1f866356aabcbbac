"""Compaction of rows: Hopper kernels skip ignored and masked tokens.

A kernel writes the indices of the active rows and their number, on the device. Another gathers those rows
into a compact copy. Later kernels read the number on the device, so the host never synchronizes.

Few rows (Plan.skips_rows is false) stay where they are. The dlogits of inactive rows are 0, and their rows of
X are cleared for the product that sums over rows, because 0 times NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.memory import empty_statistics

__all__ = [
    "clear_rows",
    "clear_rows_and_factors",
    "gather_rows",
    "new_gather_buffers",
    "order_rows",
    "order_rows_and_factors",
    "scale_rows",
]

# The size of the buffer into which a forward pass gathers rows, part after part. If all dlogits are saved,
# the buffer adds to the peak of memory. A smaller one leaves clusters idle at the end of each part: on an
# H100 (width 4096, 32000 classes) a part of 4864 rows is 35.98 waves of tiles and takes 36; a part of 4096
# rows is 30.3 and takes 31.
_GATHER_BUFFER_BYTES = 38 << 20


def order_rows(
    rows: Tensor,
    *,
    target: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = 0,
) -> Tensor:
    """[N + 1] int64: the indices of the active rows, then of the other rows; last, the number of active rows.

    A row is active if mask is True there, or if its target is not ignore_index. Give one of the two.
    """
    return _ordered(rows, target, mask, ignore_index, None, None, 1.0, False)


def order_rows_and_factors(
    rows: Tensor,
    grad_loss: Tensor,
    unit: float,
    mean: bool,
    *,
    target: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """`order_rows`, and the factors [N] float32 of the rows' gradients. One kernel writes both.

    All factors are unit * grad_loss, for a `mean` divided by the number of active rows (by 1 if none is).

    grad_loss: [], the upstream gradient of the sum or the mean of the rows' losses.
    """
    factors = empty_statistics(rows, rows.shape[0])
    return _ordered(rows, target, mask, ignore_index, grad_loss, factors, unit, mean), factors


def _ordered(
    rows: Tensor,
    target: Tensor | None,
    mask: Tensor | None,
    ignore_index: int,
    upstream: Tensor | None,
    factors: Tensor | None,
    unit: float,
    mean: bool,
) -> Tensor:
    order = rows.new_empty(rows.shape[0] + 1, dtype=torch.int64)
    stream = streams.current(rows.device.index)
    _C.order_rows(order, target, mask, upstream, factors, ignore_index, unit, mean, 1, stream)
    return order


def clear_rows(
    rows: Tensor, *, target: Tensor | None = None, mask: Tensor | None = None, ignore_index: int = 0
) -> Tensor:
    """A copy of rows [N, D] in which rows that are not active are 0, even if they hold NaN.

    rows: aligned, D a multiple of 8 (memory.padded). The others: as of `order_rows`.
    """
    return _cleared(rows, target, mask, ignore_index, None, None, 1.0, False)


def clear_rows_and_factors(
    rows: Tensor,
    grad_loss: Tensor,
    unit: float,
    mean: bool,
    *,
    target: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """`clear_rows`, and factors [N + 1] float32. One kernel writes both.

    The factors are those of `order_rows_and_factors`, but 0 for rows that are not active. The last one is for
    a sum over rows: 0 if none is active.
    """
    factors = empty_statistics(rows, rows.shape[0] + 1)
    return _cleared(rows, target, mask, ignore_index, grad_loss, factors, unit, mean), factors


def _cleared(
    rows: Tensor,
    target: Tensor | None,
    mask: Tensor | None,
    ignore_index: int,
    upstream: Tensor | None,
    factors: Tensor | None,
    unit: float,
    mean: bool,
) -> Tensor:
    out, stream = rows.new_empty(rows.shape), streams.current(rows.device.index)
    _C.clear_rows(rows, out, target, mask, upstream, factors, ignore_index, unit, mean, 1, stream)
    return out


def new_gather_buffers(*operands: Tensor) -> list[Tensor]:
    """A buffer for each operand, into which a forward pass gathers some of its rows at a time."""
    row_block = 256
    bytes_of_row = sum(rows.element_size() * rows.shape[1] for rows in operands)
    fitting = max(_GATHER_BUFFER_BYTES // bytes_of_row // row_block, 1) * row_block
    return [rows.new_empty(min(rows.shape[0], fitting), rows.shape[1]) for rows in operands]


def gather_rows(rows: Tensor, order: Tensor, out: Tensor) -> Tensor:
    """out[i] = rows[order[i]]; the rows of out behind the active ones are 0."""
    return scale_rows(rows, None, out, order)


def scale_rows(
    rows: Tensor, factor: Tensor | None, out: Tensor, order: Tensor | None, *, scatters: bool = False
) -> Tensor:
    """out = factor[:, None] * rows in one kernel. A row that is not active, or whose factor is 0, becomes 0
    even if it holds NaN.

    Args:
        factor: [N], in the order; None: 1.
        order: from order_rows. The kernel gathers: out[i] = factor[i] * rows[order[i]].
        scatters: the kernel scatters instead: out[order[i]] = factor[i] * rows[i].
    """
    _C.scale_rows(rows, factor, out, order, scatters, 1, streams.current(rows.device.index))
    return out
