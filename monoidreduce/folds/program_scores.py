"""Scores of attention that a user's score_mod and mask_mod make.

On a GPU, kernels are compiled for the functions (cuda/kernels.py). On the CPU, the engine interprets them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.attention_mask import Mask
from monoidreduce._ops.attention_passes import BackwardTensors
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import allows_planes, empty_statistics, launch_on
from monoidreduce.folds.cpu.bytecode import scores_code
from monoidreduce.folds.cuda import kernels
from monoidreduce.folds.cuda.cuda_source import TableSum
from monoidreduce.folds.integer_sums import factors_of, sums_of
from monoidreduce.folds.program.integers import most_numbers
from monoidreduce.folds.program.program import parse

__all__ = ["MOST_SIZES", "ProgramScores"]

MOST_SIZES = 24  # ModifiedScoresData::kMostSizes (device/program/score_element.h)


class ProgramScores(NamedTuple):
    """score = program(scale * <q, k>), which may also exclude the key.

    Attributes:
        mask: causal mask, window or packed sequences, beside what the program excludes.
        program: text of the traced functions.
        table, table_index: the captured tensors, reals and integers, one behind another.
        sizes: the offset of each captured tensor in its table, and its sizes.
        blocks: [B, H, ...], which blocks of scores are skipped: on a GPU `BlockMask.links`, on the CPU
            `BlockMask.kinds`.
        block_rows, block_columns: queries and keys of a block.
        weights: the program returns weights, which are not normalized: `attend`, which has no lse.
        d_table: on a GPU, what the backward kernels add the gradient of `table` to; None if they do not.
    """

    scale: float
    mask: Mask
    program: str
    table: Tensor | None
    table_index: Tensor | None
    sizes: list[int]
    blocks: Tensor | None = None
    block_rows: int = 1
    block_columns: int = 1
    weights: bool = False
    d_table: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        return None

    def plan_forward(self, q: Tensor, k: Tensor, v: Tensor) -> _C.Plan:
        return _C.plan_modified_attention_forward(
            q,
            k,
            v,
            blocks=self.blocks,
            row_spans=self.mask.row_spans,
            column_spans=self.mask.column_spans,
            scale=self.scale,
            left=self.mask.left,
            right=self.mask.right,
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            weights=self.weights,
            planes=allows_planes(),
        )

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, needed: list[bool]
    ) -> _C.Plan:
        """If none of the gradients of q, k and v is needed, the plan is of all."""
        dq, dk, dv = (t if wanted else None for t, wanted in zip((q, k, v), needed, strict=False))
        return _C.plan_modified_attention_backward(
            q,
            k,
            v,
            blocks=self.blocks,
            row_spans=self.mask.row_spans,
            column_spans=self.mask.column_spans,
            scale=self.scale,
            left=self.mask.left,
            right=self.mask.right,
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            weights=self.weights,
            dq=dq,
            dk=dk,
            dv=dv,
            d_table=self.d_table,
            planes=allows_planes(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def recomputes_out(self, plan: _C.Plan) -> bool:
        """True for all kernels, SIMT too, unless the program gives weights (`attend`)."""
        return not self.weights

    def call_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        out_low: Tensor | None,
        scratch: Tensor | None,
        plan: _C.Plan | None,
    ) -> None:
        left, right, row_spans, column_spans = self.mask
        program: str | int
        if plan is None:
            program = self._code(q, k, gradient=False)
        else:
            program = self._kernel(kernels.FORWARD, q, v, plan)
        of_rows: tuple[Tensor | None, Tensor | None] = lse, lse_low
        if self.weights:  # on a GPU, memory that the kernels write and nobody reads
            of_rows = None, None
            if plan is not None:
                of_rows = empty_statistics(q, *q.shape[:3]), empty_statistics(q, *q.shape[:3])
        _C.modified_attention_forward(
            q,
            k,
            v,
            self.table,
            self.table_index,
            self.blocks,
            sinks,
            row_spans,
            column_spans,
            out,
            *of_rows,
            out_low,
            scratch,
            program,
            self.sizes,
            self.scale,
            left,
            right,
            self.block_rows,
            self.block_columns,
            self.weights,
            *launch_on(q),
            plan,
        )

    def call_backward(self, t: BackwardTensors, plan: _C.Plan | None) -> None:
        if plan is None or self.d_table is None:
            self._run_backward(t, plan, None)
        elif not torch.are_deterministic_algorithms_enabled():
            self._run_backward(t, plan, "floats")
        else:
            self._run_backward(t, plan, "largest")
            gathers = sum(name == "gather" for name, *_ in parse(self.program).nodes)
            factors = factors_of(self.d_table, gathers * t.q.shape[:3].numel() * t.k.shape[2])
            integers = torch.zeros_like(factors, dtype=torch.int64)
            self._replace(d_table=factors)._run_backward(t, plan, "integers", integers)
            self.d_table.copy_(sums_of(integers, factors))

    def _run_backward(
        self,
        t: BackwardTensors,
        plan: _C.Plan | None,
        tables: TableSum | None,
        table_integers: Tensor | None = None,
    ) -> None:
        left, right, row_spans, column_spans = self.mask
        program: str | int
        if plan is None:
            program = self._code(t.q, t.k, gradient=True)
        else:
            which = kernels.BACKWARD_IN_TURN if plan.in_turn else kernels.BACKWARD
            program = self._kernel(which, t.q, t.v, plan, tables)
        lse: Tensor | None = t.lse
        lse_low: Tensor | None = t.lse_low
        if self.weights:  # on a GPU the kernels read what forward did not return
            lse = lse_low = None if plan is None else empty_statistics(t.q, *t.q.shape[:3]).zero_()
        _C.modified_attention_backward(
            t.q,
            t.k,
            t.v,
            self.table,
            self.table_index,
            self.blocks,
            t.sinks,
            row_spans,
            column_spans,
            t.grad_out,
            t.grad_lse,
            t.out,
            lse,
            lse_low,
            t.out_low,
            t.dq,
            t.dk,
            t.dv,
            self.d_table,
            table_integers,
            t.dsinks,
            t.scratch,
            program,
            self.sizes,
            self.scale,
            left,
            right,
            self.block_rows,
            self.block_columns,
            self.weights,
            *launch_on(t.q),
            plan,
        )

    def _code(self, q: Tensor, k: Tensor, gradient: bool) -> str:
        """The program for the CPU engine. gradient: the program of a backward pass."""
        most = most_numbers("q, k", *q.shape[:3], k.shape[2])
        return scores_code(self.program, tuple(self.sizes), most, gradient)

    def _kernel(self, which: str, q: Tensor, v: Tensor, plan: _C.Plan, tables: TableSum | None = None) -> int:
        """The handle of a kernel. which, tables: see `kernels.compiled_scores`."""
        if not kernels.is_available():
            raise RuntimeError(
                "score_mod, mask_mod, weight: on a GPU their kernels are compiled by NVRTC, and there is "
                "none: pip install nvidia-cuda-nvrtc"
            )
        width, packed = max(q.shape[3], v.shape[3]), self.mask.is_packed
        most, index = most_numbers("q, k", *q.shape[:3], v.shape[2]), q.device.index
        return kernels.scores_kernel(
            self.program,
            which,
            packed,
            q.dtype,
            width,
            plan.tier,
            self.scale,
            self.weights,
            most,
            tables,
            index,
        )
