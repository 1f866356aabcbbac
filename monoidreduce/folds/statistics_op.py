"""Forward and backward pass of the op `statistics`, which folds a traced program.

The gradient of row data is the total of a derived program over the columns; that of column data is its total
over the rows. So both are forward passes of other programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    empty_statistics,
    launch_on,
    new_gradient,
    rounded_gradients,
)
from monoidreduce.folds.cpu.bytecode import backward_code, forward_code
from monoidreduce.folds.cuda import cuda_passes, cuda_payload, cuda_rows, kernels
from monoidreduce.folds.cuda.cuda_attention import attention_of
from monoidreduce.folds.operands import NO_TABLES, Data, Operands, Tables, place
from monoidreduce.folds.program.derivative import Sums, column_sums, row_sums
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.payloads import is_mean, may_exclude, weights, with_score
from monoidreduce.folds.program.program import Program, parse, with_sizes
from monoidreduce.folds.program.variance import deviations
from monoidreduce.folds.torch.chunked import Chunked
from monoidreduce.workspace import get_workspace

Folded = tuple[Tensor, Tensor, Tensor]  # values, low words of log-sum-exps, indices
# For each input of the op, the axis of its rows or columns, along which batches are split; None for tables,
# which all batches share. Then the same for each result.
AXES = (0, 0, 0, 0, 1, 1, 0, None, 1, 1, None)
_AXES_OF_RESULTS = (1, 0, 1, 1)

__all__ = [
    "AXES",
    "backward",
    "fold",
    "forward",
    "ignored_rows",
    "joined",
    "leave_out",
    "parts_of",
    "results",
    "totals",
]


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
    if parse(program).most:
        (program, _), _ = _most_alone(program)
    try:
        forward_code(program, *counts)
        if parse(program).variances:
            text, kept, _ = deviations(program, counts[0])
            forward_code(text, *(len(kept[kind]) for kind in ("row", "row_index", "column", "column_index")))
    except TraceError as error:
        return error.reason
    try:
        if gradient:
            backward_code(program, *counts)
    except TraceError as error:
        return f"its gradient has {error.reason}; without a gradient, call it under torch.no_grad()"
    return None


def results(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    payload: Tensor | None,
    table: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    table_index: Tensor | None,
    program: str,
    widths: list[int],
    batches: int,
    sizes: list[int],
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, low, indices = _results(parse(program), a)
    return values, _sums(a, payload), low, indices


def parts_of(tensors: Sequence[Tensor | None], axes: Sequence[int | None], batches: int) -> Iterator[Any]:
    """The tensors of each batch.

    axes: the axis along which a tensor has those of all batches; None if all batches have the same.
    """
    count = max(batches, 1)  # without batches there is one fold, of nothing
    for i in range(count):
        yield [
            t if t is None or axis is None else t.narrow(axis, i * (size := t.shape[axis] // count), size)
            for t, axis in zip(tensors, axes, strict=True)
        ]


def joined(parts: Sequence[Sequence[Tensor]], axes: Sequence[int | None]) -> tuple[Tensor, ...]:
    """The tensors of all batches, from those of each; their sum where the axis is None."""
    return tuple(
        torch.stack(of_parts).sum(0) if axis is None else torch.cat(of_parts, axis)
        for *of_parts, axis in zip(*parts, axes, strict=True)
    )


def _results(program: Program, a: Tensor) -> Folded:
    rows = a.shape[0]
    return (
        empty_statistics(a, program.values, rows),
        empty_statistics(a, len(program.softmaxes), rows),
        a.new_empty(program.indices, rows, dtype=torch.int64),
    )


def _sums(a: Tensor, payload: Tensor | None) -> Tensor:
    """Memory for the payload sums, [rows, width of the payload]."""
    return empty_statistics(a, a.shape[0], 0 if payload is None else payload.shape[1])


def fold(program: str, operands: Operands, data: Data, scale: float, tables: Tables = NO_TABLES) -> Folded:
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
    payload: Tensor | None,
    table: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    table_index: Tensor | None,
    program: str,
    widths: list[int],
    batches: int,
    sizes: list[int],
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fold each batch of rows with its batch of columns.

    a, b and all others but the tables have those of all batches, one after another: [batches * N, D],
    [batches * V, D].
    """
    inputs = (a, b, other_a, other_b, row, column, payload, table, row_index, column_index, table_index)
    widths, sizes = widths or [], sizes or []  # AOTInductor passes an empty list as None
    operands, of, data = (a, b, other_a, other_b), parse(program), (row, column, row_index, column_index)
    _check(of, operands, payload, widths)
    tables = table, table_index
    attention = attention_of(program, sizes, operands, data, payload, batches, scale, tables)
    if attention is not None:
        return attention.forward()
    program = with_sizes(program, tuple(sizes)) if sizes else program
    plan = cuda_payload.plan_of(program, operands, payload, widths, batches)
    if plan is not None:
        found = cuda_payload.fold(program, operands, data, payload, widths, batches, scale, plan, tables)
    else:
        parts: Any = parts_of(inputs, AXES, batches) if batches != 1 else [inputs]
        options: Any = (program, widths, scale, workspace)
        of_parts = [_forward(*part, *options) for part in parts]
        found = of_parts[0] if batches == 1 else joined(of_parts, _AXES_OF_RESULTS)  # type: ignore[assignment]
    values, sums, low, indices = found
    if of.ignored is not None:
        leave_out(of, ignored_rows(of, row_index), values, sums, indices)
    return values, sums, low, indices


def _check(of: Program, operands: Operands, payload: Tensor | None, widths: list[int]) -> None:
    """Check what a hand-written call of the op might get wrong."""
    a, b, other_a, _ = operands
    if (other_a is not None) != (of.scores == 2):
        raise ValueError("other_a, other_b: expected them for a program of two scores, and for no other")
    if len(widths) != len(of.payloads) or sum(widths) != (0 if payload is None else payload.shape[1]):
        raise ValueError(
            "widths: expected one for each payload sum of the program, of the columns of payload"
        )
    most_numbers("a, b", len(a), len(b))


def _forward(
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    payload: Tensor | None,
    table: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    table_index: Tensor | None,
    program: str,
    widths: list[int],
    scale: float,
    workspace: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of = parse(program)
    operands, data = (a, b, other_a, other_b), (row, column, row_index, column_index)
    has_numbers, sums, tables = of.values or of.indices, _sums(a, payload), (table, table_index)
    folded = _numbers(program, operands, data, scale, workspace, tables) if has_numbers else _results(of, a)
    if payload is not None:
        operands = _in_dtype_of_sums(of, operands, payload)
        payload = payload.to(operands[0].dtype)
        of_sums = zip(torch.split(payload, widths, 1), torch.split(sums, widths, 1), strict=True)
        for number, (vectors, to) in enumerate(of_sums):
            if to.shape[1] == 0:
                continue
            _write_sum(program, number, operands, data, vectors, folded, scale, workspace, to, tables)
    values, low, indices = folded
    return values, sums, low, indices


def ignored_rows(program: Program, row_index: Tensor | None) -> Tensor:
    """[rows] Whether a row is ignored."""
    assert row_index is not None and program.ignored is not None
    label, value = program.ignored
    return row_index[label] == value


def leave_out(program: Program, ignored: Tensor, values: Tensor, sums: Tensor, indices: Tensor) -> None:
    """Write the results of an empty fold to the ignored rows."""
    largest, counts, end = len(program.largest), len(program.counts), program.first_variance
    log_sum_exps = accumulate((len(softmax) for softmax in program.softmaxes[:-1]), initial=0)
    lowest = (*(log_sum_exps if program.softmaxes else ()), *range(end - largest, end))
    if len(lowest) < program.first_of_most:
        values.masked_fill_(ignored, 0)
    for k in lowest:
        values[k].masked_fill_(ignored, -math.inf)
    if counts:
        indices[largest : largest + counts].masked_fill_(ignored, 0)
    if largest:
        indices[:largest].masked_fill_(ignored, -1)
    if program.most:
        values[program.first_of_most :].masked_fill_(ignored, -math.inf)
        indices[largest + counts :].masked_fill_(ignored, -1)
    if program.payloads:
        sums.masked_fill_(ignored[:, None], 0)


def _numbers(
    program: str,
    operands: Sequence[Tensor | None],
    data: Data,
    scale: float,
    workspace: int | None,
    tables: Tables,
) -> Folded:
    """The statistics of numbers. operands: a pair for each score; the second may be None."""
    a, b, *others = operands
    assert a is not None and b is not None
    if len(others) > 2 or not _has_kernels(a):
        return Chunked(program, tuple(operands), data, scale, workspace, tables).forward()
    other_a, other_b = others
    of = parse(program)
    if of.most and not cuda_passes.finds_most(of, (a, b, other_a, other_b)):
        return _with_most(of, operands, data, scale, workspace, tables)
    if not of.variances:
        return fold(program, (a, b, other_a, other_b), data, scale, tables)
    first = fold(replace(of, variances=()).text, (a, b, other_a, other_b), data, scale, tables)
    return _with_variances(of, first, (a, b, other_a, other_b), data, scale, tables)


def _with_most(
    program: Program,
    operands: Sequence[Tensor | None],
    data: Data,
    scale: float,
    workspace: int | None,
    tables: Tables,
) -> Folded:
    """Add the k largest, which torch finds, to what the kernels fold."""
    (text, most), kept = _most_alone(program.text)
    of_most, at = Chunked(most, tuple(operands), _kept(kept, data), scale, workspace, tables).most()
    others = parse(text)
    a = operands[0]
    assert a is not None
    has_numbers = others.values or others.indices
    values, low, indices = (
        _numbers(text, operands, data, scale, workspace, tables) if has_numbers else _results(others, a)
    )
    return torch.cat((values, of_most)), low, torch.cat((indices, at))


@lru_cache(256)
def _most_alone(text: str) -> tuple[tuple[str, str], Mapping[str, Sequence[int]]]:
    """The program without the k largest; the program of these alone, and the data that it uses."""
    program = parse(text)
    most, kept = Program(program.nodes, most=program.most, ignored=program.ignored).pruned()
    return (replace(program, most=()).text, most.text), kept


def _with_variances(
    program: Program, folded: Folded, operands: Operands, data: Data, scale: float, tables: Tables
) -> Folded:
    """Add the variances by a second fold, which knows the means, and so finds what these lack."""
    values, low, indices = folded
    row, column, row_index, column_index = data
    at = [program.mean_of(n) for n in range(len(program.variances))]
    means = torch.stack([values[place] for place in at])
    text, kept, places = deviations(program.text, _count(row))
    known = means if row is None else torch.cat((row, means))
    used = operands if parse(text).scores == 2 else (*operands[:2], None, None)
    found, _, _ = fold(text, used, _kept(kept, (known, column, row_index, column_index)), scale, tables)
    for mean, first in zip(at, places, strict=True):
        values[mean] += found[first].nan_to_num(0, 0, 0)  # an infinite mean stays
    variances = [found[first + 1] - found[first] ** 2 for first in places]
    return torch.cat((values, torch.stack(variances))), low, indices


def _write_sum(
    program: str,
    number: int,
    operands: Operands,
    data: Data,
    vectors: Tensor,
    folded: Folded,
    scale: float,
    workspace: int | None,
    to: Tensor,
    tables: Tables,
) -> None:
    """Write payload sum `number`, [rows, E]: the product of the elements' weights with the vectors [V, E]."""
    a, of, (row, column, row_index, column_index) = operands[0], parse(program), data
    softmax, _ = of.payloads[number]
    by = torch.full_like(a[:, 0], 1 / scale, dtype=to.dtype)
    lse = low = by  # not read if the sum is a total
    if softmax >= 0:
        lse, low = folded[0][sum(map(len, of.softmaxes[:softmax]))], folded[1][softmax]
    further = []  # columns beside the vectors
    # On a GPU the log-sum-exp and the weights may come from kernels that round scores differently. The sum of
    # float32 weights is then off by more than their rounding errors, so the mean is divided by it.
    by_weights = a.is_cuda and vectors.dtype.itemsize > 2 and is_mean(of, number)
    if by_weights:
        further.append(torch.ones_like(vectors[:, :1]))
    if may_exclude(program, number):  # 0 times a vector that is not finite would be NaN
        further.append((~vectors.isfinite()).any(1, keepdim=True).to(vectors.dtype))
        vectors = vectors.nan_to_num(0, 0, 0)
    vectors = torch.cat((vectors, *further), 1) if further else vectors
    text, kept = weights(program, number, _count(row))
    known = torch.cat([t for t in (row, torch.stack((lse, low, by))) if t is not None])
    unread = vectors.new_zeros(1, vectors.shape[1]).expand(len(a), -1)  # the rows of a score that has no use
    of_weights, nothing = _kept(kept, (known, column, row_index, column_index)), _results(parse(text), a)
    scores = _with_score(operands, unread, vectors)
    needed = [i == len(scores) - 2 for i in range(len(scores) + 3)]
    found = gradients(text, scores, of_weights, nothing, nothing[0], scale, workspace, needed, True, tables)
    result = found[len(scores) - 2]
    assert result is not None
    width = to.shape[1]
    to.copy_(result[:, :width])
    if by_weights:
        whole = result[:, width, None]
        to.div_(whole.masked_fill(whole == 0, 1))
    if may_exclude(program, number):
        to.masked_fill_(result[:, -1:] != 0, torch.nan)


def _in_dtype_of_sums(program: Program, operands: Operands, payload: Tensor) -> Operands:
    """The operands in the dtype in which payload sums are computed.

    That is float32 beside a payload in float32, which is not rounded, and for totals of float16, whose
    weights may exceed its range.
    """
    a, b, other_a, other_b = operands
    exceeds = a.dtype == torch.float16 and any(softmax < 0 for softmax, _ in program.payloads)
    dtype = accumulation_dtype(a.dtype) if exceeds else payload.dtype
    if dtype == a.dtype:
        return operands
    other_a, other_b = (None if t is None else t.to(dtype) for t in (other_a, other_b))
    return a.to(dtype), b.to(dtype), other_a, other_b


def _with_score(operands: Operands, rows: Tensor, columns: Tensor) -> tuple[Tensor | None, ...]:
    """The pairs of operands of all scores: the program's own, then (rows, columns) for one score more."""
    own = operands[:2] if operands[2] is None else operands
    return *own, rows, columns


def backward(
    grad_values: Tensor | None,
    grad_sums: Tensor | None,
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    payload: Tensor | None,
    table: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    table_index: Tensor | None,
    values: Tensor,
    sums: Tensor,
    low: Tensor,
    indices: Tensor,
    program: str,
    widths: list[int],
    batches: int,
    sizes: list[int],
    scale: float,
    workspace: int | None,
    needed: Sequence[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    inputs = (a, b, other_a, other_b, row, column, payload, table, row_index, column_index, table_index)
    operands, data = (a, b, other_a, other_b), (row, column, row_index, column_index)
    attention = attention_of(
        program, sizes or [], operands, data, payload, batches, scale, (table, table_index)
    )
    if attention is not None:
        by = [needed[i] for i in (0, 1, 6, 7)]
        d_a, d_b, *others = attention.backward(grad_values, grad_sums, values, sums, low, by, unrounded)
        return rounded_gradients([d_a, d_b, *[None] * 4, *others], inputs[:8], needed[:8], unrounded)
    program = with_sizes(program, tuple(sizes)) if sizes else program
    tensors: Any = (grad_values, grad_sums, *inputs, values, sums, low, indices)
    together = batches == 1 or _at_once(program, inputs, needed, workspace, batches)
    options: Any = (program, widths or [], scale, workspace, needed, unrounded, batches if together else 1)
    if together:
        return _backward(*tensors, *options)
    axes = (*_AXES_OF_RESULTS[:2], *AXES, *_AXES_OF_RESULTS)
    found = [_backward(*part, *options) for part in parts_of(tensors, axes, batches)]
    # A gradient that is not needed has one axis, of no elements.
    of_gradients = zip(AXES, found[0], strict=False)
    return list(joined(found, [axis if axis is None else min(axis, t.dim() - 1) for axis, t in of_gradients]))


def _at_once(
    program: str, inputs: Sequence[Tensor | None], needed: Sequence[bool], workspace: int | None, batches: int
) -> bool:
    """Whether the gradients of all batches are computed together: on a GPU, if only those of operands and of
    one payload are needed."""
    a, b, other_a, other_b, row, column, payload, table, *_ = inputs
    assert a is not None and b is not None
    of_data = zip(needed[4:8], (row, column, None, table), strict=True)
    of, others = parse(program), any(wanted and t is not None for wanted, t in of_data)
    if not a.is_cuda or not _has_kernels(a) or others or of.most or of.variances or len(of.payloads) > 1:
        return False
    operands: Any = (a, b, other_a, other_b)
    if payload is not None and of.payloads:
        if other_a is not None or payload.dtype != a.dtype or payload.shape[1] == 0:
            return False
        rows = payload.new_empty(len(a), payload.shape[1])  # of the score that the sum's gradient is
        operands, needed = (a, b, rows, payload), (*needed[:2], False, needed[6])
        if a.dtype == torch.float16 and of.payloads[0][0] < 0:  # totals are computed in float32
            return False
    bytes = get_workspace() if workspace is None else workspace
    return cuda_passes.fits_batches(operands, bytes, needed, batches)


def _backward(
    grad_values: Tensor | None,
    grad_sums: Tensor | None,
    a: Tensor,
    b: Tensor,
    other_a: Tensor | None,
    other_b: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    payload: Tensor | None,
    table: Tensor | None,
    row_index: Tensor | None,
    column_index: Tensor | None,
    table_index: Tensor | None,
    values: Tensor,
    sums: Tensor,
    low: Tensor,
    indices: Tensor,
    program: str,
    widths: list[int],
    scale: float,
    workspace: int | None,
    needed: Sequence[bool],
    unrounded: bool,
    batches: int,
) -> list[Tensor]:
    """The gradients of one batch, or of several that `_at_once` takes."""
    data, of, tables = (row, column, row_index, column_index), parse(program), (table, table_index)
    inputs = (a, b, other_a, other_b, row, column, payload, table)
    if of.ignored is not None:  # their local gradients are 0, and 0 * NaN is NaN
        ignored = ignored_rows(of, row_index)[:, None]
        a = a.masked_fill(ignored, 0)
        other_a, grad_sums = (None if t is None else t.masked_fill(ignored, 0) for t in (other_a, grad_sums))
    operands = (a, b, other_a, other_b)
    if grad_values is None:
        grad_values = torch.zeros_like(values)
    found: list[Tensor | None] = [None] * 8

    def finished() -> list[Tensor]:
        if found[7] is None and table is not None:
            found[7] = torch.zeros_like(table)
        if of.ignored is not None:
            for of_rows in (found[0], found[2]):
                if of_rows is not None:
                    of_rows.masked_fill_(ignored, 0)
        return rounded_gradients(found, inputs, needed[:8], unrounded)

    if payload is None or grad_sums is None or payload.shape[1] == 0:
        folded = values, low, indices
        wanted: Sequence[bool] = (*needed[:6], needed[7])
        *found[:6], found[7] = gradients(
            program, operands, data, folded, grad_values, scale, workspace, wanted, unrounded, tables, batches
        )
        found[6] = None if payload is None else torch.zeros_like(payload)
        return finished()
    # Each payload sum by itself, as a statistic of one more score. The numbers come with the first.
    operands = _in_dtype_of_sums(of, operands, payload)
    of_data = (needed[4] and row is not None) or (needed[5] and column is not None)
    d_payload = torch.zeros_like(payload, memory_format=torch.contiguous_format)
    of_sums = zip(
        *(torch.split(t, widths, 1) for t in (payload.to(operands[0].dtype), grad_sums, sums, d_payload)),
        strict=True,
    )
    for number, (vectors, upstream, total, d_vectors) in enumerate(of_sums):
        if vectors.shape[1] == 0:
            continue
        text, at = with_score(program, number)
        scores = _with_score(operands, upstream.to(vectors.dtype), vectors)
        # The fold scales all scores, so this one's mean and its gradient make up for that.
        mean, by = (upstream * total).sum(1)[None] * scale, torch.full_like(upstream[:, :1].mT, 1 / scale)
        if of_data and vectors.dtype.itemsize == 2:
            # Gradients of data are as accurate as float32 sums; a mean by weights in 16 bits is too coarse.
            mean = _numbers(text, scores, data, scale, workspace, tables)[0][at : at + 1]
        folded = torch.cat((values[:at], mean, values[at:])), low, indices
        upstreams = torch.cat((grad_values[:at], by, grad_values[at:]))
        wanted = (*needed[: len(scores) - 2], False, needed[6], *needed[4:6], needed[7])
        sums_rounded = unrounded or len(widths) > 1
        *parts, _, of_vectors, d_row, d_column, d_table = gradients(
            text, scores, data, folded, upstreams, scale, workspace, wanted, sums_rounded, tables, batches
        )
        parts += [None] * (4 - len(parts))
        found = [*map(_added, found, (*parts, d_row, d_column, None, d_table))]
        if of_vectors is not None:
            d_vectors.copy_(of_vectors[:, : d_vectors.shape[1]])
        grad_values = torch.zeros_like(grad_values)
    found[6] = d_payload if needed[6] else None
    return finished()


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, in the accumulation dtype; None is 0."""
    return x if y is None else y if x is None else x.to(accumulation_dtype(x.dtype)) + y


def gradients(
    program: str,
    operands: Sequence[Tensor | None],
    data: Data,
    folded: Folded,
    grad_values: Tensor,
    scale: float,
    workspace: int | None,
    needed: Sequence[bool],
    unrounded: bool,
    tables: Tables = NO_TABLES,
    batches: int = 1,
) -> list[Tensor | None]:
    """The gradients of the operands, of the row data, of the column data and of the table of reals, by the
    statistics of numbers.

    operands: a pair for each score; the second may be None. folded: values, low words and indices. needed:
    for each gradient; where it is False, the result is None. unrounded: the gradients of rows are in the
    dtype in which they were summed. tables: reals and integers that the program gathers from.
    """
    a, b, *_ = operands
    assert a is not None and b is not None
    (row, column, row_index, column_index), (values, low, indices) = data, folded
    if parse(program).most:
        return _gradients_with_most(
            program, operands, data, folded, grad_values, scale, workspace, needed, tables
        )
    known = torch.cat([t for t in (row, values, low, grad_values) if t is not None])
    known_index = row_index
    if row_index is None or parse(program).largest:
        at = indices[: len(parse(program).largest)]
        known_index = at if row_index is None else torch.cat((row_index, at))
    counts = (_count(row), _count(row_index))
    d_table = None
    if needed[-1] and tables[0] is not None:
        chunked = Chunked(program, tuple(operands), data, scale, workspace, tables)
        d_table = chunked.of_table(known, known_index, counts)
    if len(operands) > 4 or not _has_kernels(a):
        chunked = Chunked(program, tuple(operands), data, scale, workspace, tables)
        return [*chunked.backward(known, known_index, counts, needed), d_table]
    first, second, third, fourth = operands
    assert first is not None and second is not None
    of_scores: Operands = (first, second, third, fourth)
    all_data = (known, column, known_index, column_index)
    if a.is_cuda:
        of_columns = (_count(column), _count(column_index))
        bytes = get_workspace() if workspace is None else workspace
        sizes = (*counts, *of_columns)
        if batches > 1:
            return [
                *cuda_passes.backward_of_batches(
                    program, of_scores, all_data, sizes, scale, bytes, needed[:4], unrounded, batches, tables
                ),
                *(None, None, None),
            ]
        if cuda_rows.takes(of_scores, bytes):
            of_rows = cuda_rows.backward(
                program, of_scores, all_data, sizes, scale, bytes, list(needed), tables
            )
            return [*of_rows, d_table]
        wanted = list(needed[:4])
        d_operands = cuda_passes.backward(
            program, of_scores, all_data, sizes, scale, bytes, wanted, unrounded, tables=tables
        )
    else:
        d_operands = [
            new_gradient(t, wanted, unrounded and i % 2 == 0) if t is not None else None
            for i, (t, wanted) in enumerate(zip(of_scores, needed, strict=False))
        ]
        if any(t is not None for t in d_operands):
            code = backward_code(program, *counts, _count(column), _count(column_index))
            d_a, d_b, d_other_a, d_other_b = d_operands
            _C.statistics_backward(
                *of_scores, *all_data, *tables, d_a, d_b, d_other_a, d_other_b, code, scale, *launch_on(a)
            )
    d_row = d_column = None
    if needed[4] and row is not None:
        d_row = totals(row_sums(program, *counts), row, of_scores, all_data, scale, tables)
    if needed[5] and column is not None:
        positions = torch.arange(b.shape[0], device=b.device)[None]
        indices_of_rows = positions if column_index is None else torch.cat((column_index, positions))
        exchanged = (column, known, indices_of_rows, known_index)
        sums = column_sums(program, *counts)
        d_column = totals(sums, column, (second, first, fourth, third), exchanged, scale, tables)
    return [*d_operands, d_row, d_column, d_table]


def _gradients_with_most(
    program: str,
    operands: Sequence[Tensor | None],
    data: Data,
    folded: Folded,
    grad_values: Tensor,
    scale: float,
    workspace: int | None,
    needed: Sequence[bool],
    tables: Tables,
) -> list[Tensor | None]:
    """`gradients` of a program that has the k largest values, in the accumulation dtype."""
    of, (values, low, indices) = parse(program), folded
    (others, most), kept = _most_alone(program)
    first, first_index = of.first_of_most, len(of.largest) + len(of.counts)
    found: list[Tensor | None] = [None] * len(needed)
    if first:
        of_others = values[:first], low, indices[:first_index]
        found = gradients(
            others, operands, data, of_others, grad_values[:first], scale, workspace, needed, True, tables
        )
    used = _kept(kept, data)
    counts = _count(used[0]), _count(used[2])
    chunked = Chunked(most, tuple(operands), used, scale, workspace, tables)
    of_most = grad_values[first:], indices[first_index:]
    *d_operands, d_row, d_column = chunked.backward(used[0], used[2], counts, needed, of_most)
    d_data = _spread(d_row, kept["row"], data[0]), _spread(d_column, kept["column"], data[1])
    d_table = chunked.of_table(used[0], used[2], counts, of_most) if needed[-1] else None
    added = (*d_operands, *d_data, d_table)
    for i, (x, y) in enumerate(zip(found, added, strict=True)):
        if (
            x is not None and y is not None and x.shape != y.shape
        ):  # kernels read operands padded to whole vectors
            found[i] = x[:, : y.shape[1]]
    return [_added(x, y) for x, y in zip(found, added, strict=True)]


def _spread(gradients: Tensor | None, numbers: Sequence[int], of: Tensor | None) -> Tensor | None:
    """The gradients of all data `of`, from those of the data with these numbers."""
    if gradients is None or of is None:
        return None
    found = torch.zeros_like(of, dtype=gradients.dtype, memory_format=torch.contiguous_format)
    place(gradients, numbers, found)
    return found


def totals(
    programs: Sequence[Sums],
    of: Tensor,
    operands: Operands,
    data: Data,
    scale: float,
    tables: Tables = NO_TABLES,
) -> Tensor:
    """The gradients of the data `of`, as totals of derived programs.

    data: reals of rows, reals of columns, integers of rows, integers of columns.
    """
    gradients = torch.zeros_like(of, memory_format=torch.contiguous_format)
    a, b, other_a, other_b = operands
    for sums in programs:
        two = parse(sums.text).scores == 2
        used = (a, b, *((other_a, other_b) if two else (None, None)))
        found, _, _ = fold(sums.text, used, _kept(sums.kept, data), scale, tables)
        place(found, sums.of, gradients)
    return gradients


def _kept(kept: Mapping[str, Sequence[int]], data: Data) -> Data:
    """The data that a derived program uses."""
    row, column, row_index, column_index = (
        None if t is None or not kept[kind] else _chosen(t, kept[kind])
        for kind, t in zip(("row", "column", "row_index", "column_index"), data, strict=True)
    )
    return row, column, row_index, column_index


def _chosen(t: Tensor, numbers: Sequence[int]) -> Tensor:
    """The rows of t with these indices. Not t[numbers]: a list is copied to the GPU, and the host waits."""
    return t if list(numbers) == [*range(len(t))] else torch.stack([t[number] for number in numbers])
