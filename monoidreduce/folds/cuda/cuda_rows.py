"""The gradients of a program on a GPU for narrow operands: each thread, or with planes each block, owns rows.

Gradients of rows are one pass over the columns; gradients of columns are the same pass with rows and columns
exchanged. No local gradients are stored, and no sum depends on the order in which blocks run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import allows_planes, empty_statistics, launch_on
from monoidreduce.folds.cuda.cuda_passes import as_kernels_read, contiguous, planes_of, widths_of
from monoidreduce.folds.cuda.kernels import row_gradient_kernel
from monoidreduce.folds.operands import Counts, ProgramCall, place
from monoidreduce.folds.program.derivative import gradient

__all__ = ["backward", "takes"]


# Of each row or column. Numbers of a tile of columns lie in shared memory, where 27 fit beside the planes.
# NVRTC takes minutes for gradients that read many more than 16.
_MOST_NUMBERS_OF_PLANES = 16


def takes(call: ProgramCall) -> bool:
    """Whether the rows are narrow enough for these kernels."""
    return _plan(call, _allows_planes(call)).owned_rows is not None


def _allows_planes(call: ProgramCall) -> bool:
    def numbers(data: Tensor | None, index: Tensor | None) -> int:
        return (0 if data is None else len(data)) + (0 if index is None else 2 * len(index))  # 32 bits each

    row, column, row_index, column_index = call.data
    most = max(numbers(row, row_index), numbers(column, column_index))
    return allows_planes() and most <= _MOST_NUMBERS_OF_PLANES


def _plan(call: ProgramCall, planes: bool, sums: int = 1) -> _C.Plan:
    """The plan of the row kernels.

    sums: how many numbers of row data get a gradient. Planning assumes one, so the workspace is cut.
    """
    width = sum(widths_of(call.operands))
    room = call.bytes * (width + 1) // (width + max(sums, 1))
    return _C.plan_statistics_row_gradient(*call.operands, workspace=room, planes=planes)


def backward(
    call: ProgramCall, counts: Counts, needed: Sequence[bool], of_row: bool, of_column: bool
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of the four operands, of the row data and of the column data, in the accumulation dtype.

    The call's data include what `derivative.gradient` adds.

    Args:
        counts: of data without that.
        needed: for each operand.
        of_row, of_column: whether those of data are needed.
    """
    of, planes = gradient(call.program, *counts[:2]), _allows_planes(call)
    by_rows, by_columns = (
        tuple(number for number, by in enumerate(all) if by is not None) for all in (of.rows, of.columns)
    )
    row, column, row_index, column_index = call.data
    d_a, d_other_a, d_row = _sums(call, counts, planes, False, by_rows, [*needed[0:4:2], of_row])
    position = torch.arange(len(call.b), device=call.b.device)[None]
    numbered = position if column_index is None else torch.cat((column_index, position))
    exchanged = call._replace(
        scores=tuple((columns, rows) for rows, columns in call.scores),
        data=(column, row, numbered, row_index),
    )
    d_b, d_other_b, d_column = _sums(exchanged, counts, planes, True, by_columns, [*needed[1:4:2], of_column])
    return (
        [d_a, d_b, d_other_a, d_other_b],
        None if d_row is None else _placed(d_row, by_rows, counts[0]),
        None if d_column is None else _placed(d_column, by_columns, counts[2]),
    )


def _sums(
    call: ProgramCall, counts: Counts, planes: bool, of_columns: bool, by: tuple[int, ...], needed: list[bool]
) -> list[Tensor | None]:
    """Gradients of everything that belongs to rows: operands [rows, width], and row data [len(by), rows].

    planes: whether kernels may read planes. of_columns: rows and columns are exchanged. by: data numbers.
    """
    by = by if needed[2] else ()
    a, plan = call.a, _plan(call, planes, len(by))
    assert plan.owned_rows is not None
    of_operands, splits = needed[0] or needed[1], plan.owned_rows.splits
    operands = as_kernels_read(call.operands, plan)
    shapes: list[tuple[int, ...] | None] = [
        (len(a), width) if width and of_operands else None for width in widths_of(operands)
    ]
    shapes.append((len(by), len(a)) if needed[2] else None)
    found = [None if shape is None else empty_statistics(a, splits, *shape) for shape in shapes]
    if of_operands or by:
        kernel = row_gradient_kernel(
            call.program,
            counts,
            of_columns,
            of_operands,
            by,
            a.dtype,
            plan,
            widths_of(operands),
            a.device.index,
        )
        d_a, d_other_a, sums = found
        _C.statistics_row_gradient(
            *operands,
            *contiguous(call.data),
            *call.tables,
            d_a,
            d_other_a,
            sums,
            *planes_of(operands, plan)[:2],
            kernel,
            call.scale,
            call.bytes,
            *launch_on(a),
            plan,
        )
    d_a, d_other_a, sums = (None if t is None else t[0] if splits == 1 else t.sum(0) for t in found)
    return [None if d_a is None else d_a[:, : a.shape[1]].contiguous(), d_other_a, sums]


def _placed(sums: Tensor, by: tuple[int, ...], count: int) -> Tensor:
    """The gradients of all data; 0 for data that nothing depends on."""
    gradients = sums.new_zeros(count, sums.shape[1])
    place(sums, by, gradients)
    return gradients
