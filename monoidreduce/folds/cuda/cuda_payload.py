"""A program in one pass of a GPU kernel: statistics of numbers and sums of vectors, of all batches.

For programs with payload sums and for several batches, with 16-bit operands on Hopper whose rows fit into
shared memory. A kernel reads the vectors in slabs of 64 columns, and adds up a few of them. A wider payload
takes several kernels, each of which computes the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import empty_statistics, launch_on, padded
from monoidreduce.folds.cuda import kernels
from monoidreduce.folds.cuda.cuda_passes import contiguous
from monoidreduce.folds.cuda.cuda_source import state_words
from monoidreduce.folds.operands import Data, Operands, Tables
from monoidreduce.folds.program.payloads import counting_excluded
from monoidreduce.folds.program.program import Program, parse

__all__ = ["fold", "plan_of"]

_Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # values, low words, indices, payload sums

_SLAB = 64  # columns of the payload
_KERNELS = 2  # at most: each computes the scores, and with more of them stored weights need fewer products


def plan_of(
    program: str, operands: Operands, payload: Tensor | None, widths: Sequence[int], batches: int
) -> _C.Plan | None:
    """The plan of a call that `fold` takes; None if it takes none."""
    a, of = operands[0], parse(program)
    slabs = sum(-(-width // _SLAB) for width in widths)
    if not a.is_cuda or (slabs == 0 and batches == 1) or of.most or of.variances:
        return None
    if (payload is not None and payload.dtype != a.dtype) or not kernels.is_available():
        return None
    plan = _C.plan_statistics_fold(*operands, state_words=state_words(program))
    return plan if plan.payload_slabs and slabs <= _KERNELS * plan.payload_slabs else None


def fold(
    program: str,
    operands: Operands,
    data: Data,
    payload: Tensor | None,
    widths: Sequence[int],
    batches: int,
    scale: float,
    plan: _C.Plan,
    tables: Tables,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, payload sums, low words of log-sum-exps, and indices.

    payload: [V, sum of widths], the vectors of all payload sums. batches: as in the op `statistics`. Rows and
    columns are at least one of each. tables: reals and integers that the program gathers from.
    """
    of, rows = parse(program), operands[0].shape[0]
    of_slabs = [n for n, width in enumerate(widths) for _ in range(0, width, _SLAB)]
    results = _results(of, operands[0], len(of_slabs) * _SLAB)
    call = _Call(operands, [*widths], of_slabs, batches, scale, plan, tables)
    values, low, indices, sums = results
    if payload is None:
        call.launch(program, (), data, None, None, results)
        return values, sums, low, indices
    vectors = torch.split(payload, call.widths, 1)
    whole = payload if all(width % _SLAB == 0 for width in widths) else _in_slabs(vectors)
    call.launch(program, (), data, whole, None, results)
    # 0 times a vector that is not finite is NaN. If there is one, a second launch counts the rows in which it
    # has a weight, and multiplies another in its place.
    text, counted = counting_excluded(program, 0 if data[1] is None else data[1].shape[0])
    if counted:
        # A vector times 0 is 0 or NaN. With isfinite().all(1) torch took 0.25 ms of a call of 2.7 (H200).
        spoiled = torch.stack([vectors[n] @ vectors[n].new_zeros(widths[n]) for n in counted]) != 0
        row, column, row_index, column_index = data
        column = torch.cat([t for t in (column, spoiled.to(torch.float32)) if t is not None])
        of_counts = operands[0].new_empty(of.indices + len(counted), rows, dtype=torch.int64)
        call.launch(
            text,
            counted,
            (row, column, row_index, column_index),
            whole.nan_to_num(0, 0, 0),
            spoiled.any().to(torch.int64)[None],
            (values, low, of_counts, sums),
        )
    if sums.shape[1] != sum(widths):
        starts = accumulate((width + -width % _SLAB for width in widths), initial=0)
        sums = torch.cat([sums.narrow(1, at, width) for at, width in zip(starts, widths, strict=False)], 1)
    return values, sums, low, indices


def _results(program: Program, a: Tensor, width: int) -> _Results:
    rows = a.shape[0]
    return (
        empty_statistics(a, program.values, rows),
        empty_statistics(a, len(program.softmaxes), rows),
        a.new_empty(program.indices, rows, dtype=torch.int64),
        empty_statistics(a, rows, width),
    )


def _in_slabs(vectors: Sequence[Tensor]) -> Tensor:
    """The vectors of all payload sums side by side, so that each slab has those of one."""
    return torch.cat([F.pad(t, (0, -t.shape[1] % _SLAB)) for t in vectors], 1)


class _Call(NamedTuple):
    """What both launches have in common. of_slabs: the number of each slab's payload sum."""

    operands: Operands
    widths: list[int]
    of_slabs: list[int]
    batches: int
    scale: float
    plan: _C.Plan
    tables: Tables

    def launch(
        self,
        program: str,
        counted: tuple[int, ...],
        data: Data,
        payload: Tensor | None,
        wanted: Tensor | None,
        results: _Results,
    ) -> None:
        """counted: as in `cuda_source.fold_source`. wanted: kernels do nothing if this number is 0."""
        a = self.operands[0]
        row, column, row_index, column_index = contiguous(data)
        of_row, of_row_index, of_column, of_column_index = (
            0 if t is None else t.shape[0] for t in (row, row_index, column, column_index)
        )
        counts = of_row, of_row_index, of_column, of_column_index
        slabs = len(self.of_slabs)
        parts = max(-(-slabs // self.plan.payload_slabs), 1)
        bounds = [*pairwise(slabs * i // parts for i in range(parts + 1))]
        of_kernels = tuple(tuple(self.of_slabs[slice(*bound)]) for bound in bounds)
        kernel = kernels.payload_kernels(
            program, counts, counted, of_kernels, a.dtype, self.plan, a.device.index
        )
        a, b, *others = self.operands
        a, b = padded(a), padded(b)
        other_a, other_b = (None if t is None else padded(t) for t in others)
        for number, (first_slab, _) in enumerate(bounds):
            _C.statistics_payload(
                a,
                b,
                other_a,
                other_b,
                row,
                column,
                row_index,
                column_index,
                *self.tables,
                None if payload is None else padded(payload),
                wanted,
                *results,
                kernel + number,
                self.batches,
                first_slab,
                self.scale,
                *launch_on(a),
                self.plan,
            )
