"""The op `statistics`, which folds a traced program: its batches, and which passes compute them.

one attention call    `cuda_attention`, for the mean of vectors by a softmax
one kernel            `cuda_payload`, for numbers and payload sums of all batches
otherwise             `number_passes` and `payload_passes`, a batch at a time
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.memory import empty_statistics, rounded_gradients
from monoidreduce.folds.cuda import cuda_passes, cuda_payload, kernels
from monoidreduce.folds.cuda.cuda_attention import attention_of
from monoidreduce.folds.number_passes import Wanted, empty_results, gradients, numbers
from monoidreduce.folds.operands import ProgramCall, Results
from monoidreduce.folds.payload_passes import payload_gradients, payload_sums
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.payloads import separated
from monoidreduce.folds.program.program import Program, parse, with_sizes

# For each input of the op, the axis of its rows or columns, along which batches are split; None for tables,
# which all batches share. Then the same for each result.
AXES = (0, 0, 0, 0, 1, 1, 0, None, 1, 1, None)
_AXES_OF_RESULTS = (1, 0, 1, 1)
_FLOATING = 8  # the inputs with gradients: a, b, other_a, other_b, row, column, payload, table

__all__ = [
    "AXES",
    "Inputs",
    "Options",
    "backward",
    "forward",
    "ignored_rows",
    "joined",
    "leave_out",
    "parts_of",
    "results",
]


class Inputs(NamedTuple):
    """The inputs of the op. All but the tables have those of all batches, one after another.

    Attributes:
        a, b: [batches * N, D], [batches * V, D].
        other_a, other_b: likewise, those of a second score.
        row, column, row_index, column_index: reals and integers of rows and of columns, [data, rows or
            columns].
        payload: the vectors of all payload sums side by side, [batches * V, sum of widths]. If a column has
            several vectors for a payload sum (`Program.vectors`), the first ones of all payload sums, then
            the second ones, and so on.
        table, table_index: what the program gathers from.
    """

    a: Tensor
    b: Tensor
    other_a: Tensor | None
    other_b: Tensor | None
    row: Tensor | None
    column: Tensor | None
    payload: Tensor | None
    table: Tensor | None
    row_index: Tensor | None
    column_index: Tensor | None
    table_index: Tensor | None


class Options(NamedTuple):
    """The options of the op.

    Attributes:
        widths: of each payload sum. AOTInductor passes an empty list as None, here and below.
        sizes: of the captured tensors in the tables.
    """

    program: str
    widths: list[int] | None
    batches: int
    sizes: list[int] | None
    scale: float
    workspace: int | None


def _call(inputs: Inputs, options: Options) -> ProgramCall:
    """The call of all batches, with the sizes of captured tensors not yet in the program."""
    a, b, other_a, other_b, row, column, _, table, row_index, column_index, table_index = inputs
    scores = ((a, b),) if other_a is None or other_b is None else ((a, b), (other_a, other_b))
    data, tables = (row, column, row_index, column_index), (table, table_index)
    return ProgramCall(options.program, scores, data, options.scale, tables, options.workspace)


def results(*arguments: Any) -> Results:
    """Memory for the results of a call of the op."""
    inputs, options = Inputs(*arguments[:11]), Options(*arguments[11:])
    values, low, indices = empty_results(parse(options.program), inputs.a)
    return values, empty_statistics(inputs.a, len(inputs.a), sum(options.widths or ())), low, indices


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


def forward(*arguments: Any) -> Results:
    """Fold each batch of rows with its batch of columns."""
    inputs, options = Inputs(*arguments[:11]), Options(*arguments[11:])
    of, widths, batches = parse(options.program), options.widths or [], options.batches
    _check(of, inputs, widths)
    call = _call(inputs, options)
    attention = attention_of(call, inputs.payload, batches, options.sizes or [])
    if attention is not None:
        return attention.forward()
    if options.sizes:
        options = _with_sizes(options)
        call = _call(inputs, options)
    plan = cuda_payload.plan_of(call, inputs.payload, widths, batches)
    found: Any
    if plan is not None:
        found = cuda_payload.fold(call, inputs.payload, widths, batches, plan)
    elif batches == 1:
        found = _forward(call, inputs.payload, widths)
    else:
        parts = [Inputs(*part) for part in parts_of(inputs, AXES, batches)]
        found = joined(
            [_forward(_call(part, options), part.payload, widths) for part in parts], _AXES_OF_RESULTS
        )
    values, sums, low, indices = found
    if of.ignored is not None:
        leave_out(of, ignored_rows(of, inputs.row_index), values, sums, indices)
    return values, sums, low, indices


def _with_sizes(options: Options) -> Options:
    """The options with the sizes of captured tensors in the program."""
    return options._replace(program=with_sizes(options.program, tuple(options.sizes or ())))


def _check(of: Program, inputs: Inputs, widths: list[int]) -> None:
    """Check what a hand-written call of the op might get wrong."""
    if not (of.scores == 2) == (inputs.other_a is not None) == (inputs.other_b is not None):
        raise ValueError("other_a, other_b: expected them for a program of two scores, and for no other")
    width = 0 if inputs.payload is None else inputs.payload.shape[1]
    if len(widths) != len(of.payloads) or of.vectors * sum(widths) != width:
        raise ValueError(
            "widths: expected one for each payload sum of the program, of the columns of payload"
        )
    most_numbers("a, b", inputs.a.shape[0], inputs.b.shape[0])


def _forward(call: ProgramCall, payload: Tensor | None, widths: Sequence[int]) -> Results:
    """The results of one batch."""
    of = call.parsed
    folded = numbers(call) if of.values or of.indices else empty_results(of, call.a)
    values, low, indices = folded
    if payload is None:
        return values, empty_statistics(call.a, call.a.shape[0], 0), low, indices
    call, vectors = call._replace(program=separated(call.program)), of.vectors
    sums = payload_sums(call, payload, [*widths] * vectors, folded)
    if vectors > 1:
        sums = sums.view(len(sums), vectors, sum(widths)).sum(1)
    return values, sums, low, indices


def ignored_rows(program: Program, row_index: Tensor | None) -> Tensor:
    """[rows] Whether a row is ignored."""
    assert row_index is not None and program.ignored is not None
    label, value = program.ignored
    return row_index[label] == value


def leave_out(program: Program, ignored: Tensor, values: Tensor, sums: Tensor, indices: Tensor) -> None:
    """Write the results of an empty fold to the ignored rows."""
    largest, counts = len(program.largest), len(program.counts)
    lowest = (*program.log_sum_exps, *range(program.first_largest, program.first_entropy))
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


def backward(*arguments: Any) -> list[Tensor]:
    """The gradients of all inputs. An input that needs none has an empty tensor.

    arguments: upstream gradients of values and sums, inputs, results, options, which of the inputs need a
    gradient, and whether those of rows keep the dtype in which they were summed.
    """
    upstream, inputs, results = arguments[:2], Inputs(*arguments[2:13]), arguments[13:17]
    options, (needed, *rest) = Options(*arguments[17:23]), arguments[23:]
    unrounded, batches = bool(rest and rest[0]), options.batches
    call = _call(inputs, options)
    attention = attention_of(call, inputs.payload, batches, options.sizes or [])
    if attention is not None:
        by = [needed[i] for i in (0, 1, 6, 7)]
        (grad_values, grad_sums), (values, sums, low, _) = upstream, results
        of_attention = attention.backward(grad_values, grad_sums, values, sums, low, by, unrounded)
        d_a, d_b, d_payload, d_table = of_attention
        found = [d_a, d_b, *[None] * 4, d_payload, d_table]
        return rounded_gradients(found, inputs[:_FLOATING], needed[:_FLOATING], unrounded)
    if options.sizes:
        options = _with_sizes(options)
        call = _call(inputs, options)
    if batches == 1 or _at_once(call, inputs.payload, upstream[1], needed, batches):
        return _backward(call, inputs, options, upstream, results, needed, unrounded, batches)
    axes = (*AXES, *_AXES_OF_RESULTS[:2], *_AXES_OF_RESULTS)
    parts = []
    for part in parts_of((*inputs, *upstream, *results), axes, batches):
        of_batch, by, found = Inputs(*part[:11]), part[11:13], part[13:]
        parts.append(_backward(_call(of_batch, options), of_batch, options, by, found, needed, unrounded, 1))
    # A gradient that is not needed has one axis, of no elements.
    of_gradients = zip(AXES, parts[0], strict=False)
    return list(joined(parts, [axis if axis is None else min(axis, t.dim() - 1) for axis, t in of_gradients]))


def _at_once(
    call: ProgramCall, payload: Tensor | None, grad_sums: Tensor | None, needed: Sequence[bool], batches: int
) -> bool:
    """Whether the gradients of all batches are computed together: those of operands and payloads alone, with
    payload sums beside two scores, or by kernels of a GPU for one payload."""
    of, (row, column, *_) = call.parsed, call.data
    of_data = zip(needed[4:8], (row, column, None, call.tables[0]), strict=True)
    if any(wanted and t is not None for wanted, t in of_data) or batches == 0:
        return False
    if payload is not None and payload.shape[1] and grad_sums is not None and len(call.scores) == 2:
        return True  # torch computes them, in chunks that may have several batches
    if not call.a.is_cuda or not kernels.is_available():
        return False
    if of.most or of.variances or len(of.payloads) > 1 or of.vectors > 1:
        return False
    if payload is not None and of.payloads:
        if len(call.scores) > 1 or payload.dtype != call.a.dtype or payload.shape[1] == 0:
            return False
        rows = payload.new_empty(len(call.a), payload.shape[1])  # of the score that the sum's gradient is
        call, needed = call._replace(scores=(*call.scores, (rows, payload))), (*needed[:2], False, needed[6])
        if payload.dtype == torch.float16 and of.payloads[0][0] < 0:  # totals are computed in float32
            return False
    return cuda_passes.fits_batches(call, needed, batches)


def _backward(
    call: ProgramCall,
    inputs: Inputs,
    options: Options,
    upstream: Sequence[Tensor | None],
    results: Results,
    needed: Sequence[bool],
    unrounded: bool,
    batches: int,
) -> list[Tensor]:
    """The gradients of one batch, or of several that `_at_once` takes."""
    payload, (grad_values, grad_sums) = inputs.payload, upstream
    of, (values, sums, low, indices) = call.parsed, results
    if of.ignored is not None:  # their local gradients are 0, and 0 * NaN is NaN
        ignored = ignored_rows(of, inputs.row_index)[:, None]
        call = call._replace(
            scores=tuple((rows.masked_fill(ignored, 0), columns) for rows, columns in call.scores)
        )
        grad_sums = None if grad_sums is None else grad_sums.masked_fill(ignored, 0)
    if grad_values is None:
        grad_values = torch.zeros_like(values)
    wanted = Wanted(tuple(needed[: 2 * len(call.scores)]), needed[4], needed[5], needed[7])
    if payload is None or grad_sums is None or payload.shape[1] == 0:
        found = gradients(call, (values, low, indices), grad_values, wanted, unrounded, batches)
        d_payload = None if payload is None else torch.zeros_like(payload)
    else:
        widths, of_results = options.widths or [], (grad_values, grad_sums)
        if of.scores == 1:  # kernels have two scores, so each vector is a payload sum of its own
            call, widths = call._replace(program=separated(call.program)), widths * of.vectors
            # Gradients of weights need only the sum over the vectors: let the first vectors have all of it.
            others = [torch.zeros_like(sums)] * (of.vectors - 1)
            results = values, torch.cat((sums, *others), 1) if others else sums, low, indices
            of_results = grad_values, grad_sums.repeat(1, of.vectors)
        found, d_payload = payload_gradients(
            call, payload, widths, of_results, results, wanted, needed[6], unrounded, batches
        )
    of_scores = [*found.scores, *[None] * (4 - len(found.scores))]
    if of.ignored is not None:
        for of_rows in of_scores[::2]:
            if of_rows is not None:
                of_rows.masked_fill_(ignored, 0)
    d_table = found.table
    if d_table is None and inputs.table is not None:
        d_table = torch.zeros_like(inputs.table)
    all_gradients = [*of_scores, found.row, found.column, d_payload, d_table]
    return rounded_gradients(all_gradients, inputs[:_FLOATING], needed[:_FLOATING], unrounded)
