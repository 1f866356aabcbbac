"""Forward and backward pass of the op `statistics`, which folds a traced program.

The gradient of row data is the total of a derived program over the columns; that of column data is its total
over the rows. So both are forward passes of other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import empty_statistics, launch_on, new_gradient, rounded_gradients
from monoidreduce.folds.cpu.bytecode import backward_code, forward_code
from monoidreduce.folds.cuda import cuda_passes, cuda_rows, kernels
from monoidreduce.folds.operands import Data, Operands, Tables, place
from monoidreduce.folds.program.derivative import Sums, column_sums, row_sums
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.program import Program, parse
from monoidreduce.folds.torch.chunked import Chunked
from monoidreduce.workspace import get_workspace

__all__ = ["backward", "fold", "forward", "results", "totals"]


def _has_kernels(a: Tensor) -> bool:
    if not a.is_cuda:
        return True
    return kernels.is_available()


def _count(data: Tensor | None) -> int:
    return 0 if data is None else data.shape[0]


@lru_cache(256)
def obstacle(program: str, counts: tuple[int, int, int, int], gradient: bool) -> str | None:
    """Why the CPU engine cannot run a program or its gradient; None if it can.

    counts: numbers of row data, integer row data, column data, and integer column data.
    """
    try:
        forward_code(program, *counts)
        if gradient:
            backward_code(program, *counts)
    except TraceError as error:
        return error.reason
    return None


def results(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    program: str,
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(parse(program), a)


def _results(program: Program, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = a.shape[0]
    return (
        empty_statistics(a, program.values, rows),
        empty_statistics(a, len(program.softmaxes), rows),
        a.new_empty(program.indices, rows, dtype=torch.int64),
    )


def fold(
    program: str, operands: Operands, data: Data, scale: float, tables: Tables = (None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward pass of a program: values, low words of log-sum-exps, and indices.

    data: reals of rows, reals of columns, integers of rows, integers of columns. tables: reals and integers
    that the program gathers from.
    """
    a = operands[0]
    folded = _results(parse(program), a)
    row, column, row_index, column_index = data
    counts = (_count(row), _count(row_index), _count(column), _count(column_index))
    if a.is_cuda:
        cuda_passes.fold(program, operands, data, counts, folded, scale, tables)
    else:
        code = forward_code(program, *counts)
        _C.statistics_forward(*operands, *data, *tables, *folded, code, scale, *launch_on(a))
    return folded


def forward(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    program: str,
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if (other_a is not None) != (parse(program).scores == 2):
        raise ValueError("other_a, other_b: expected them for a program of two scores, and for no other")
    most_numbers("a, b", len(a), len(b))
    operands, data = (a, b, other_a, other_b), (row, column, row_index, column_index)
    if not _has_kernels(a):
        return Chunked(program, operands, data, scale, workspace).forward()
    return fold(program, operands, data, scale)


def backward(
    grad_values: Tensor,
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    values: Tensor,
    low: Tensor,
    indices: Tensor,
    program: str,
    scale: float,
    workspace: int | None,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    of = parse(program)
    known = torch.cat([t for t in (row, values, low, grad_values) if t is not None])
    known_index = torch.cat([t for t in (row_index, indices[: len(of.largest)]) if t is not None])
    operands: Operands = (a, b, other_a, other_b)
    inputs = (*operands, row, column)
    counts = (_count(row), _count(row_index))
    if not _has_kernels(a):
        chunked = Chunked(program, operands, (row, column, row_index, column_index), scale, workspace)
        found = chunked.backward(known, known_index, counts, needed)
        return rounded_gradients(found, inputs, needed[:6], unrounded)
    data = (known, column, known_index, column_index)
    if a.is_cuda:
        of_columns = (_count(column), _count(column_index))
        bytes = get_workspace() if workspace is None else workspace
        sizes = (*counts, *of_columns)
        if cuda_rows.takes(operands, bytes):
            found = cuda_rows.backward(program, operands, data, sizes, scale, bytes, needed[:6])
            return rounded_gradients(found, inputs, needed[:6], unrounded)
        d_operands = cuda_passes.backward(program, operands, data, sizes, scale, bytes, needed[:4], unrounded)
    else:
        d_operands = [
            new_gradient(t, wanted, unrounded and (t is a or t is other_a)) if t is not None else None
            for t, wanted in zip(operands, needed, strict=False)
        ]
        if any(t is not None for t in d_operands):
            code = backward_code(program, *counts, _count(column), _count(column_index))
            d_a, d_b, d_other_a, d_other_b = d_operands
            _C.statistics_backward(
                *operands, *data, None, None, d_a, d_b, d_other_a, d_other_b, code, scale, *launch_on(a)
            )
    d_row = d_column = None
    if needed[4] and row is not None:
        d_row = totals(row_sums(program, *counts), row, operands, data, scale)
    if needed[5] and column is not None:
        positions = torch.arange(b.shape[0], device=b.device)[None]
        indices_of_rows = positions if column_index is None else torch.cat((column_index, positions))
        exchanged = (column, known, indices_of_rows, known_index)
        sums = column_sums(program, *counts)
        d_column = totals(sums, column, (b, a, other_b, other_a), exchanged, scale)
    return rounded_gradients((*d_operands, d_row, d_column), inputs, needed[:6], unrounded)


def totals(
    programs: Sequence[Sums],
    of: Tensor,
    operands: Operands,
    data: Data,
    scale: float,
    tables: Tables = (None, None),
) -> Tensor:
    """The gradients of the data `of`, as totals of derived programs.

    data: reals of rows, reals of columns, integers of rows, integers of columns.
    """
    gradients = torch.zeros_like(of, memory_format=torch.contiguous_format)
    a, b, other_a, other_b = operands
    for sums in programs:
        row, column, row_index, column_index = (
            None if t is None or not sums.kept[kind] else _chosen(t, sums.kept[kind])
            for kind, t in zip(("row", "column", "row_index", "column_index"), data, strict=True)
        )
        two = parse(sums.text).scores == 2
        used = (a, b, *((other_a, other_b) if two else (None, None)))
        found, _, _ = fold(sums.text, used, (row, column, row_index, column_index), scale, tables)
        place(found, sums.of, gradients)
    return gradients


def _chosen(t: Tensor, numbers: Sequence[int]) -> Tensor:
    """The rows of t with these indices. Not t[numbers]: a list is copied to the GPU, and the host waits."""
    return t if list(numbers) == [*range(len(t))] else torch.stack([t[number] for number in numbers])
