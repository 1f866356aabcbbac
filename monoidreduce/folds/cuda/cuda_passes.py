"""The passes of a program by GPU kernels.

Forward is one fold. Backward computes the local gradients (the gradients of the scores) for as many columns
at a time as fit in the workspace, and multiplies them with the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from monoidreduce._ops.dlogits import FrozenHead, Head, HeadSlice, multiply_dlogits
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    allows_planes,
    empty_statistics,
    launch_on,
    padded,
    padded_weight,
)
from monoidreduce._ops.planes import FrozenPlaneHead, PlaneHead, split_rows
from monoidreduce._ops.products import write_products
from monoidreduce._ops.slices import Needed, columns_in
from monoidreduce.folds.cuda.cuda_source import state_words
from monoidreduce.folds.cuda.kernels import fold_kernels, gradient_kernels
from monoidreduce.folds.operands import Counts, Data, Folded, Operands, ProgramCall

__all__ = [
    "as_kernels_read",
    "backward",
    "backward_of_batches",
    "contiguous",
    "finds_most",
    "fits_batches",
    "fold",
    "multiplied_by_torch",
    "planes_of",
    "rows_product",
    "widths_of",
]

# The planes of a, b, other_a and other_b. The last two are None if the program has one score. All are None if
# its kernels do not read planes.
_Planes: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_LEAST_COLUMNS = 256  # smallest slice of columns without tensor cores


def as_kernels_read(operands: Operands, plan: _C.Plan) -> Operands:
    """The operands, aligned and padded as the kernels of tensor cores need."""
    if not plan.tensor_cores:
        return operands
    a, b, other_a, other_b = operands
    if other_a is None or other_b is None:
        return padded(a), padded_weight(b, plan), None, None
    return padded(a), padded_weight(b, plan), padded(other_a), padded_weight(other_b, plan)


def planes_of(operands: Operands, plan: _C.Plan) -> _Planes:
    """The operands in planes, if the plan's kernels read them."""
    a, b, other_a, other_b = (split_rows(t) if plan.planes and t is not None else None for t in operands)
    return a, b, other_a, other_b


def widths_of(operands: Operands) -> tuple[int, int]:
    """The widths of the operands of both scores; 0 for the second if there is only one."""
    a, _, other_a, _ = operands
    return a.shape[1], 0 if other_a is None else other_a.shape[1]


def contiguous(data: Data) -> Data:
    row, column, row_index, column_index = (None if t is None else t.contiguous() for t in data)
    return row, column, row_index, column_index


def fold(call: ProgramCall, results: Folded) -> None:
    """Write the values, low words and indices of all rows."""
    words, most = state_words(call.program), bool(call.parsed.most)
    plan = _C.plan_statistics_fold(*call.operands, state_words=words, finds_most=most, planes=allows_planes())
    a, widths = call.a, widths_of(call.operands)
    kernels = fold_kernels(call.program, call.counts, a.dtype, plan, widths, a.device.index)
    scratch = empty_statistics(a, plan.scratch)
    read = as_kernels_read(call.operands, plan)
    _C.statistics_fold(
        *read,
        *contiguous(call.data),
        *call.tables,
        *results,
        scratch,
        *planes_of(read, plan),
        kernels,
        words,
        most,
        call.scale,
        *launch_on(a),
        plan,
    )


def finds_most(call: ProgramCall) -> bool:
    """Whether the kernels of a program find its k largest values: on tensor cores, of one function, beside no
    variances."""
    of = call.parsed
    if not call.a.is_cuda or len(of.most) != 1 or of.variances:
        return False
    words = state_words(call.program)
    return _C.plan_statistics_fold(*call.operands, state_words=words, planes=allows_planes()).tensor_cores


def backward(
    call: ProgramCall,
    counts: Counts,
    needed: Sequence[bool],
    unrounded: bool = False,
    factors: Operands | None = None,
) -> list[Tensor | None]:
    """The gradients of the four operands, in their dtypes or as unrounded sums.

    The call's data include what `derivative.gradient` adds.

    Args:
        counts: of data without that.
        needed: for each operand.
        unrounded: return gradients in the accumulation dtype where they are summed in it.
        factors: tensors that the products read in place of the operands, with the same shapes.
    """
    if not any(needed):
        return [None] * 4
    of_other = _reads_other(call, needed)
    bytes = call.bytes // (2 if of_other else 1)
    plan, store, read = _local_gradients(call, counts, bytes, of_other)
    a, b, other_a, other_b = read if factors is None else as_kernels_read(factors, plan)
    if not plan.tensor_cores:
        return multiplied_by_torch((a, b, other_a, other_b), store, bytes, needed)

    def head(rows: Tensor, columns: Tensor, needed: Needed) -> Head | PlaneHead:
        if plan.planes:
            return PlaneHead(rows, columns, needed, clusters=plan.clusters, workspace=bytes)
        own_columns = columns_in(bytes, len(rows))
        return Head(
            rows, columns, needed, clusters=plan.clusters, own_columns=own_columns, unrounded=unrounded
        )

    heads: list[Head | PlaneHead | FrozenHead] = [head(a, b, Needed(*needed[:2]))]
    if other_a is not None and other_b is not None:
        if of_other:
            heads.append(head(other_a, other_b, Needed(*needed[2:4])))
        elif plan.planes and factors is None:
            heads.append(FrozenPlaneHead(other_a, other_b))

    def store_for_heads(part: slice, slices: list[HeadSlice]) -> None:
        first, second = slices[0], slices[1] if len(slices) > 1 else None
        planes = None
        if plan.planes and factors is None:
            of_second = (None, None) if second is None else (second.row_planes, second.column_planes)
            planes = (first.row_planes, first.column_planes, *of_second)
        store(part, first.dlogits, None if second is None else second.dlogits, planes)

    found = [
        t for of_head in multiply_dlogits(heads, store_for_heads) for t in (of_head.rows, of_head.columns)
    ]
    return [*found, *[None] * (4 - len(found))]


def backward_of_batches(
    call: ProgramCall, counts: Counts, needed: Sequence[bool], unrounded: bool, batches: int
) -> list[Tensor | None]:
    """`backward` of several batches, of which at least two fit into the workspace (`fits_batches`).

    A kernel stores the local gradients of each batch; one product multiplies those of all that fit.
    """
    of_other = _reads_other(call, needed)
    bytes = call.bytes // (2 if of_other else 1)
    first_batch = call._replace(scores=_scores_of_batch(call, 0, batches))
    a, b = first_batch.scores[0]
    kernels = _LocalGradients(first_batch, counts, bytes, of_other)
    read, data = [None if t is None else padded(t) for t in call.operands], contiguous(call.data)
    at_once, shape = min(bytes // _bytes_of_scores(a, b), batches), (len(a), len(b) + -len(b) % 8)
    local = [a.new_empty(at_once, *shape)[..., : len(b)] for _ in range(1 + of_other)]
    found: list[Tensor | None] = [
        t.new_empty(t.shape, dtype=torch.float32 if unrounded and i % 2 == 0 else t.dtype)
        if t is not None and needed[i]
        else None
        for i, t in enumerate(read)
    ]
    for first in range(0, batches, at_once):
        part = range(first, min(first + at_once, batches))
        for batch in part:
            outs = [t[batch - first] for t in local]
            of_batch, of_data = _of_batch(read, 0, batch, batches), _of_batch(data, 1, batch, batches)
            kernels.store(of_batch, of_data, slice(0, len(b)), outs[0], outs[1] if of_other else None)
        for head, gradients in enumerate(local):
            of_rows, of_columns, d_rows, d_columns = (
                None if t is None else t.view(batches, -1, t.shape[1])[part.start : part.stop]
                for t in (*read[2 * head : 2 * head + 2], *found[2 * head : 2 * head + 2])
            )
            assert of_rows is not None and of_columns is not None
            stored = gradients[: len(part)]
            if d_rows is not None:
                write_products(d_rows, stored, of_columns)
            if d_columns is not None:
                write_products(d_columns, stored.mT, of_rows)
    return found


def fits_batches(call: ProgramCall, needed: Sequence[bool], batches: int) -> bool:
    """Whether tensor cores compute the gradients, and those of two batches' scores fit into the workspace.

    The gradients of larger batches are computed one batch after the other: they fill a GPU.
    """
    if call.a.dtype.itemsize != 2 or not any(needed[:4]):
        return False
    of_batch = call._replace(scores=_scores_of_batch(call, 0, batches))
    bytes = call.bytes // (2 if _reads_other(call, needed) else 1)
    plan = _C.plan_statistics_local_gradient(
        *of_batch.operands, workspace=bytes, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    return plan.tensor_cores and 2 * _bytes_of_scores(*of_batch.scores[0]) <= bytes


def _reads_other(call: ProgramCall, needed: Sequence[bool]) -> bool:
    """Whether local gradients of a second score are needed."""
    return len(call.scores) > 1 and any(needed[2:4])


def _scores_of_batch(call: ProgramCall, batch: int, batches: int) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple(tuple(_of_batch(pair, 0, batch, batches)) for pair in call.scores)


def _of_batch(tensors: Sequence[Tensor | None], axis: int, batch: int, batches: int) -> Any:
    """The parts of tensors that have those of all batches along an axis."""
    return [
        None if t is None else t.narrow(axis, batch * (t.shape[axis] // batches), t.shape[axis] // batches)
        for t in tensors
    ]


def _bytes_of_scores(a: Tensor, b: Tensor) -> int:
    """Bytes of one score's local gradients."""
    return len(a) * (len(b) + -len(b) % 8) * a.dtype.itemsize


def rows_product(call: ProgramCall, counts: Counts, payload: Tensor) -> Tensor:
    """sum_j g_ij payload_j in float32, on tensor cores; g_ij is the local gradient of a program of one score.

    call, counts: as in `backward`. payload: [columns, width], 16-bit; the width is a multiple of 8.
    """
    bytes = call.bytes
    plan, store, _ = _local_gradients(call, counts, bytes, False)
    rows = payload.new_empty(1, payload.shape[1]).expand(len(call.a), -1)  # dummy: its product is not needed
    head = Head(
        rows,
        payload,
        Needed(rows=True, columns=False),
        clusters=plan.clusters,
        own_columns=columns_in(bytes, len(call.a)),
        unrounded=True,
    )
    (found,) = multiply_dlogits([head], lambda part, slices: store(part, slices[0].dlogits, None))
    assert found.rows is not None
    return found.rows


def _local_gradients(
    call: ProgramCall, counts: Counts, bytes: int, of_other: bool
) -> tuple[_C.Plan, Callable[..., None], Operands]:
    """The plan; a function store(part, out, other_out, planes) that writes local gradients; the operands as
    it reads them.

    bytes: memory for the local gradients of each score. of_other: whether those of a second score are needed;
    if not, there is no other_out on tensor cores. planes: all rows of a and other_a, and a part of b and
    other_b, in planes, if the caller has them.
    """
    kernels = _LocalGradients(call, counts, bytes, of_other)
    read = as_kernels_read(call.operands, kernels.plan)
    (a, b, other_a, other_b), (row, column, row_index, column_index) = read, contiguous(call.data)

    def store(
        part: slice, out: Tensor | None, other_out: Tensor | None, planes: _Planes | None = None
    ) -> None:
        of_columns = [None if t is None else t[:, part] for t in (column, column_index)]
        of_second = None if other_b is None else other_b[part]
        data = (row, of_columns[0], row_index, of_columns[1])
        assert out is not None
        kernels.store((a, b[part], other_a, of_second), data, part, out, other_out, planes)

    return kernels.plan, store, read


class _LocalGradients:
    """The kernels that store the local gradients of a call, or of one of its batches."""

    def __init__(self, call: ProgramCall, counts: Counts, bytes: int, of_other: bool) -> None:
        """Arguments as of `_local_gradients`. Of the call's data nothing is read: `store` is given them."""
        self.scale, self.bytes, self.tables = call.scale, bytes, call.tables
        self.plan = _C.plan_statistics_local_gradient(
            *call.operands,
            workspace=bytes,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            planes=allows_planes(),
        )
        a, of_first = call.a, self.plan.tensor_cores and len(call.scores) > 1 and not of_other
        self.handle = gradient_kernels(call.program, counts, a.dtype, self.plan, a.device.index, of_first)

    def store(
        self,
        operands: Operands,
        data: Data,
        part: slice,
        out: Tensor,
        other_out: Tensor | None,
        planes: _Planes | None = None,
    ) -> None:
        """Write the local gradients of all rows and the columns `part`.

        operands, data: those of all rows, and of these columns alone. planes: the operands in planes, if
        the caller has them.
        """
        _C.statistics_local_gradient(
            *operands,
            *data,
            *self.tables,
            out,
            other_out,
            *(planes_of(operands, self.plan) if planes is None else planes),
            self.handle,
            part.start,
            self.scale,
            self.bytes,
            *launch_on(operands[0]),
            self.plan,
        )


def multiplied_by_torch(
    operands: Operands, store: Callable[..., None], bytes: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the operands without tensor cores: torch multiplies, in the accumulation dtype.

    store: store(part, out, other_out) writes local gradients [rows, columns of the part]. bytes: memory for
    the local gradients of each score. needed: for each operand.
    """
    a, b, *_ = operands
    dtype, (rows, columns) = accumulation_dtype(a.dtype), (len(a), len(b))
    at_once = max(bytes // (dtype.itemsize * max(rows, 1)), _LEAST_COLUMNS)
    found = [
        accumulator(t) if t is not None and wanted else None
        for t, wanted in zip(operands, needed, strict=False)
    ]
    for first in range(0, columns, at_once):
        part = slice(first, min(first + at_once, columns))
        local = [
            None if t is None else t.new_empty(rows, part.stop - first, dtype=dtype) for t in operands[::2]
        ]
        store(part, *local)
        for gradients, of_rows, of_columns, d_rows, d_columns in zip(
            local, operands[::2], operands[1::2], found[::2], found[1::2], strict=True
        ):
            if gradients is None or of_rows is None or of_columns is None:
                continue
            if d_rows is not None:
                d_rows.addmm_(gradients, of_columns[part].to(dtype))
            if d_columns is not None:
                torch.mm(gradients.T, of_rows.to(dtype), out=d_columns[part])
    return found
