"""The statistics of numbers of a program, forward and backward, by the kernels of its device or by torch.

The gradient of row data is the total of a derived program over the columns; that of column data is its total
over the rows. So both are forward passes of other programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import accumulation_dtype, empty_statistics, launch_on, new_gradient
from monoidreduce.folds.cpu.bytecode import backward_code, forward_code
from monoidreduce.folds.cuda import cuda_passes, cuda_rows, kernels
from monoidreduce.folds.operands import Counts, Data, Folded, ProgramCall, kept_data, place
from monoidreduce.folds.program.derivative import Sums, column_sums, row_sums
from monoidreduce.folds.program.errors import TraceError
from monoidreduce.folds.program.program import Program, parse
from monoidreduce.folds.program.variance import deviations
from monoidreduce.folds.torch.chunked import Chunked

__all__ = ["Gradients", "Wanted", "added", "empty_results", "fold", "gradients", "numbers", "obstacle"]


class Wanted(NamedTuple):
    """Which gradients a backward pass computes.

    scores: for the rows and the columns of each score, one after another.
    """

    scores: tuple[bool, ...]
    row: bool = False
    column: bool = False
    table: bool = False


class Gradients(NamedTuple):
    """The gradients that are `Wanted`; None for all others."""

    scores: list[Tensor | None]
    row: Tensor | None = None
    column: Tensor | None = None
    table: Tensor | None = None


def has_kernels(a: Tensor) -> bool:
    """Whether the device of a has kernels for programs."""
    return not a.is_cuda or kernels.is_available()


@lru_cache(256)
def obstacle(program: str, counts: Counts, gradient: bool) -> str | None:
    """Why the CPU engine cannot run a program or its gradient; None if it can."""
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


def empty_results(program: Program, a: Tensor) -> Folded:
    """Memory for the results of all rows of a."""
    rows = a.shape[0]
    return (
        empty_statistics(a, program.values, rows),
        empty_statistics(a, len(program.softmaxes), rows),
        a.new_empty(program.indices, rows, dtype=torch.int64),
    )


def fold(call: ProgramCall) -> Folded:
    """The forward pass of a program, of one or two scores, that the device has kernels for."""
    a = call.a
    folded = empty_results(call.parsed, a)
    if a.is_cuda:
        cuda_passes.fold(call, folded)
    else:
        code = forward_code(call.program, *call.counts)
        _C.statistics_forward(
            *call.operands, *call.data, *call.tables, *folded, code, call.scale, *launch_on(a)
        )
    return folded


def numbers(call: ProgramCall) -> Folded:
    """The statistics of numbers of any program."""
    if len(call.scores) > 2 or not has_kernels(call.a):
        return Chunked(call).forward()
    of = call.parsed
    if of.most and not cuda_passes.finds_most(call):
        return _with_most(call)
    if of.variances:
        return _with_variances(call, fold(call._replace(program=replace(of, variances=()).text)))
    return fold(call)


def _with_most(call: ProgramCall) -> Folded:
    """Add the k largest, which torch finds, to what the kernels fold."""
    (text, most), kept = _most_alone(call.program)
    of_most, at = Chunked(call._replace(program=most, data=kept_data(kept, call.data))).most()
    others = parse(text)
    has_numbers = others.values or others.indices
    values, low, indices = (
        numbers(call._replace(program=text)) if has_numbers else empty_results(others, call.a)
    )
    return torch.cat((values, of_most)), low, torch.cat((indices, at))


@lru_cache(256)
def _most_alone(text: str) -> tuple[tuple[str, str], Mapping[str, Sequence[int]]]:
    """The program without the k largest; the program of these alone, and the data that it uses."""
    program = parse(text)
    most, kept = Program(program.nodes, most=program.most, ignored=program.ignored).pruned()
    return (replace(program, most=()).text, most.text), kept


def _with_variances(call: ProgramCall, folded: Folded) -> Folded:
    """Add the variances by a second fold, which knows the means, and so finds what these lack."""
    (values, low, indices), of = folded, call.parsed
    row, column, row_index, column_index = call.data
    at = [of.mean_of(n) for n in range(len(of.variances))]
    means = torch.stack([values[place] for place in at])
    text, kept, places = deviations(call.program, call.counts[0])
    known = means if row is None else torch.cat((row, means))
    found, _, _ = fold(_derived(call, text, kept, (known, column, row_index, column_index)))
    for mean, first in zip(at, places, strict=True):
        values[mean] += found[first].nan_to_num(0, 0, 0)  # an infinite mean stays
    variances = [found[first + 1] - found[first] ** 2 for first in places]
    return torch.cat((values, torch.stack(variances))), low, indices


def _derived(call: ProgramCall, text: str, kept: Mapping[str, Sequence[int]], data: Data) -> ProgramCall:
    """The call of a program derived from that of `call`: the scores and the data that it uses."""
    return call._replace(program=text, scores=call.scores[: parse(text).scores], data=kept_data(kept, data))


def gradients(
    call: ProgramCall,
    folded: Folded,
    grad_values: Tensor,
    wanted: Wanted,
    unrounded: bool = False,
    batches: int = 1,
) -> Gradients:
    """The gradients by the statistics of numbers.

    unrounded: those of rows are in the dtype in which they were summed.
    batches: the call has those of several, which `cuda_passes.fits_batches` takes, or more than two scores.
    """
    of = call.parsed
    if of.most:
        return _gradients_with_most(call, folded, grad_values, wanted)
    (row, column, row_index, column_index), (values, low, indices) = call.data, folded
    counts = call.counts
    known = torch.cat([t for t in (row, values, low, grad_values) if t is not None])
    known_index = row_index
    if row_index is None or of.largest:
        at = indices[: len(of.largest)]
        known_index = at if row_index is None else torch.cat((row_index, at))
    call = call._replace(data=(known, column, known_index, column_index))
    d_table = Chunked(call, batches).of_table(counts) if wanted.table and call.tables[0] is not None else None
    if len(call.scores) > 2 or not has_kernels(call.a):
        chunked = Chunked(call, batches)
        return Gradients(*chunked.backward(counts, wanted.scores, wanted.row, wanted.column), d_table)
    needed = [*wanted.scores, *[False] * (4 - len(wanted.scores))]
    used = len(wanted.scores)
    if call.a.is_cuda and batches > 1:
        of_batches = cuda_passes.backward_of_batches(call, counts, needed, unrounded, batches)
        return Gradients(of_batches[:used])
    if call.a.is_cuda and cuda_rows.takes(call):
        of_scores, d_row, d_column = cuda_rows.backward(call, counts, needed, wanted.row, wanted.column)
        return Gradients(of_scores[:used], d_row, d_column, d_table)
    by_kernels = cuda_passes.backward if call.a.is_cuda else _by_cpu
    of_scores = by_kernels(call, counts, needed, unrounded)[:used]
    d_row = d_column = None
    if wanted.row and row is not None:
        d_row = _totals(row_sums(call.program, *counts[:2]), row, call)
    if wanted.column and column is not None:
        positions = torch.arange(len(call.b), device=column.device)[None]
        numbered = positions if column_index is None else torch.cat((column_index, positions))
        exchanged = tuple((columns, rows) for rows, columns in call.scores)
        of_columns = call._replace(scores=exchanged, data=(column, known, numbered, known_index))
        d_column = _totals(column_sums(call.program, *counts[:2]), column, of_columns)
    return Gradients(of_scores, d_row, d_column, d_table)


def _by_cpu(
    call: ProgramCall, counts: Counts, needed: Sequence[bool], unrounded: bool
) -> list[Tensor | None]:
    """The gradients of the operands by the CPU engine. counts: of data without what gradients add."""
    d_a, d_b, d_other_a, d_other_b = found = [
        new_gradient(t, wanted, unrounded and i % 2 == 0) if t is not None else None
        for i, (t, wanted) in enumerate(zip(call.operands, needed, strict=True))
    ]
    if any(t is not None for t in found):
        code = backward_code(call.program, *counts)
        to = d_a, d_b, d_other_a, d_other_b
        _C.statistics_backward(
            *call.operands, *call.data, *call.tables, *to, code, call.scale, *launch_on(call.a)
        )
    return found


def _gradients_with_most(call: ProgramCall, folded: Folded, grad_values: Tensor, wanted: Wanted) -> Gradients:
    """`gradients` of a program that has the k largest values, in the accumulation dtype."""
    of, (values, low, indices) = call.parsed, folded
    (others, most), kept = _most_alone(call.program)
    first, first_index = of.first_of_most, len(of.largest) + len(of.counts)
    found = Gradients([None] * len(wanted.scores))
    if first:
        of_others = values[:first], low, indices[:first_index]
        found = gradients(call._replace(program=others), of_others, grad_values[:first], wanted, True)
    chunked = Chunked(call._replace(program=most, data=kept_data(kept, call.data)))
    counts, of_most = chunked.call.counts, (grad_values[first:], indices[first_index:])
    of_scores, d_row, d_column = chunked.backward(counts, wanted.scores, wanted.row, wanted.column, of_most)
    d_table = chunked.of_table(counts, of_most) if wanted.table else None
    row, column, *_ = call.data
    return Gradients(
        [added(_like(x, y), y) for x, y in zip(found.scores, of_scores, strict=True)],
        _or_zeros(wanted.row, added(found.row, _spread(d_row, kept["row"], row)), row),
        _or_zeros(wanted.column, added(found.column, _spread(d_column, kept["column"], column)), column),
        added(found.table, d_table),
    )


def _or_zeros(wanted: bool, gradients: Tensor | None, of: Tensor | None) -> Tensor | None:
    """The gradients of the data `of`, which are 0 if they are wanted though no result depends on the data."""
    return torch.zeros_like(of) if wanted and gradients is None and of is not None else gradients


def _like(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x without the columns that kernels added to it: they read operands padded to whole vectors."""
    return x if x is None or y is None else x[:, : y.shape[1]]


def added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, in the accumulation dtype; None is 0."""
    return x if y is None else y if x is None else x.to(accumulation_dtype(x.dtype)) + y


def _spread(gradients: Tensor | None, numbers: Sequence[int], of: Tensor | None) -> Tensor | None:
    """The gradients of all data `of`, from those of the data with these numbers."""
    if gradients is None or of is None:
        return None
    found = torch.zeros_like(of, dtype=gradients.dtype, memory_format=torch.contiguous_format)
    place(gradients, numbers, found)
    return found


def _totals(programs: Sequence[Sums], of: Tensor, call: ProgramCall) -> Tensor:
    """The gradients of the data `of`, as totals of derived programs."""
    found = torch.zeros_like(of, memory_format=torch.contiguous_format)
    for sums in programs:
        totals, _, _ = fold(_derived(call, sums.text, sums.kept, call.data))
        place(totals, sums.of, found)
    return found
