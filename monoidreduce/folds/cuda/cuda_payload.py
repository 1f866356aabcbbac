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
from monoidreduce.folds.operands import Operands, ProgramCall
from monoidreduce.folds.program.payloads import counting_excluded
from monoidreduce.folds.program.program import Program

__all__ = ["fold", "plan_of"]

_Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # values, low words, indices, payload sums

_SLAB = 64  # columns of the payload sums
_LOADED = 5  # slabs of the payload that a kernel holds beside those of the scores (PayloadFold::kStages)
_KERNELS = 2  # at most: each computes the scores, and with more of them stored weights need fewer products


def plan_of(call: ProgramCall, payload: Tensor | None, widths: Sequence[int], batches: int) -> _C.Plan | None:
    """The plan of a call that `fold` takes; None if it takes none."""
    a = call.a
    if not a.is_cuda:
        return None
    of, slabs = call.parsed, sum(-(-width // _SLAB) for width in widths)
    if (slabs == 0 and batches == 1) or of.most or of.variances:
        return None
    if (payload is not None and payload.dtype != a.dtype) or not kernels.is_available():
        return None
    plan = _C.plan_statistics_fold(*call.operands, state_words=state_words(call.program))
    of_kernel = _slabs_of_kernel(plan, of)
    return plan if of_kernel and slabs <= _KERNELS * of_kernel else None


def _slabs_of_kernel(plan: _C.Plan, program: Program) -> int:
    """The most slabs of payload sums that a kernel adds up; 0 if no kernel takes the call."""
    return min(plan.payload_slabs, _LOADED // program.vectors)


def fold(
    call: ProgramCall, payload: Tensor | None, widths: Sequence[int], batches: int, plan: _C.Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, payload sums, low words of log-sum-exps, and indices.

    payload, widths, batches: as in the op `statistics`. Rows and columns are at least one of each.
    """
    of, rows = call.parsed, len(call.a)
    of_slabs = [n for n, width in enumerate(widths) for _ in range(0, width, _SLAB)]
    results = _results(of, call.a, len(of_slabs) * _SLAB)
    kernel = _Kernel(of_slabs, batches, plan)
    values, low, indices, sums = results
    if payload is None or not of_slabs:
        kernel.launch(call, (), None, None, results)
        return values, sums, low, indices
    vectors = torch.split(payload, [*widths] * of.vectors, 1)
    whole = payload if all(width % _SLAB == 0 for width in widths) else _in_slabs(vectors)
    kernel.launch(call, (), whole, None, results)
    # 0 times a vector that is not finite is NaN. If there is one, a second launch counts the rows in which it
    # has a weight, and multiplies another in its place.
    row, column, row_index, column_index = call.data
    text, counted = counting_excluded(call.program, 0 if column is None else column.shape[0])
    if counted:
        # A vector times 0 is 0 or NaN. With isfinite().all(1) torch took 0.25 ms of a call of 2.7 (H200).
        zeros = payload.new_zeros(max(widths))
        products = [[t @ zeros[: widths[n]] for t in vectors[n :: len(widths)]] for n in counted]
        spoiled = torch.stack([torch.stack(of_sum).sum(0) for of_sum in products]) != 0
        column = torch.cat([t for t in (column, spoiled.to(torch.float32)) if t is not None])
        of_counts = call.a.new_empty(of.indices + len(counted), rows, dtype=torch.int64)
        kernel.launch(
            call._replace(program=text, data=(row, column, row_index, column_index)),
            counted,
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


class _Kernel(NamedTuple):
    """What both launches have in common. of_slabs: the number of each slab's payload sum."""

    of_slabs: list[int]
    batches: int
    plan: _C.Plan

    def launch(
        self,
        call: ProgramCall,
        counted: tuple[int, ...],
        payload: Tensor | None,
        wanted: Tensor | None,
        results: _Results,
    ) -> None:
        """counted: as in `cuda_source.fold_source`. wanted: kernels do nothing if this number is 0."""
        slabs, device = len(self.of_slabs), call.a.device
        parts = max(-(-slabs // _slabs_of_kernel(self.plan, call.parsed)), 1)
        bounds = [*pairwise(slabs * i // parts for i in range(parts + 1))]
        of_kernels = tuple(tuple(self.of_slabs[slice(*bound)]) for bound in bounds)
        kernel = kernels.payload_kernels(
            call.program, call.counts, counted, of_kernels, call.a.dtype, self.plan, device.index
        )
        a, b, *others = call.operands
        other_a, other_b = (None if t is None else padded(t) for t in others)
        read: Operands = padded(a), padded(b), other_a, other_b
        for number, (first_slab, _) in enumerate(bounds):
            _C.statistics_payload(
                *read,
                *contiguous(call.data),
                *call.tables,
                None if payload is None else padded(payload),
                wanted,
                *results,
                kernel + number,
                self.batches,
                first_slab,
                call.scale,
                *launch_on(call.a),
                self.plan,
            )
