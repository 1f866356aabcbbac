"""The scores of attention's own kernels: scaled dot products with a softcap and a bias, under a `Mask`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.attention_mask import Mask
from monoidreduce._ops.attention_passes import BackwardTensors
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import aligned_bias, allows_planes, allows_tf32, launch_on

__all__ = ["BuiltInScores"]

# out, lse, lse_low, out_low and scratch, on which no plan depends.
_NO_RESULTS = (None, None, None, None, None)


class BuiltInScores(NamedTuple):
    """score = softcap * tanh(scale * <q, k> / softcap) + bias.

    Attributes:
        softcap: 0 for none.
        bias: any shape that broadcasts to [B, H, M, N]; its gradient has this shape.
        expanded_bias: the bias as [B, H, M, N], without a copy.
        whole: out and lse of a backward pass are of all keys of k; False if k is a part of these keys.
    """

    scale: float
    softcap: float
    mask: Mask
    bias: Tensor | None = None
    expanded_bias: Tensor | None = None
    whole: bool = True

    def plan_forward(self, q: Tensor, k: Tensor, v: Tensor) -> _C.Plan:
        sinks, deterministic = None, False
        left, right, row_spans, column_spans = self.mask
        return _C.plan_attention_forward(
            q,
            k,
            v,
            self.expanded_bias,
            sinks,
            row_spans,
            column_spans,
            *_NO_RESULTS,
            self.scale,
            self.softcap,
            left,
            right,
            deterministic,
            allows_tf32(q),
            planes=allows_planes(),
        )

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, needed: list[bool]
    ) -> _C.Plan:
        """If none of the gradients of q, k and v is needed, the plan is of all."""
        sinks = dsinks = scratch = None
        left, right, row_spans, column_spans = self.mask
        dq, dk, dv = (t if wanted else None for t, wanted in zip((q, k, v), needed, strict=False))
        return _C.plan_attention_backward(
            q,
            k,
            v,
            self.expanded_bias,
            sinks,
            row_spans,
            column_spans,
            grad_out,
            *_NO_RESULTS,
            dq,
            dk,
            dv,
            self.expanded_bias if needed[3] and self.shares_bias else None,
            dsinks,
            scratch,
            self.scale,
            self.softcap,
            left,
            right,
            True,  # whole, which changes no plan
            torch.are_deterministic_algorithms_enabled(),
            allows_tf32(q),
            planes=allows_planes(),
        )

    @property
    def shares_bias(self) -> bool:
        """Whether several scores share an element of the bias, so that kernels sum its gradient."""
        if self.bias is None or self.expanded_bias is None:
            return False
        return self.bias.numel() < self.expanded_bias.numel()

    def recomputes_out(self, plan: _C.Plan) -> bool:
        return plan.tensor_cores

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
        _C.attention_forward(
            q,
            k,
            v,
            self._readable_bias(plan),
            sinks,
            row_spans,
            column_spans,
            out,
            lse,
            lse_low,
            out_low,
            scratch,
            self.scale,
            self.softcap,
            left,
            right,
            *launch_on(q),
            plan,
        )

    def call_backward(self, t: BackwardTensors, plan: _C.Plan | None) -> None:
        left, right, row_spans, column_spans = self.mask
        bias = self._readable_bias(plan)
        _C.attention_backward(
            t.q,
            t.k,
            t.v,
            bias,
            t.sinks,
            row_spans,
            column_spans,
            t.grad_out,
            t.grad_lse,
            t.out,
            t.lse,
            t.lse_low,
            t.out_low,
            t.dq,
            t.dk,
            t.dv,
            None if t.dbias is None or bias is None else t.dbias.expand(bias.shape),
            t.dsinks,
            t.scratch,
            self.scale,
            self.softcap,
            left,
            right,
            self.whole,
            *launch_on(t.q),
            plan,
        )

    def _readable_bias(self, plan: _C.Plan | None) -> Tensor | None:
        """The expanded bias, or a copy where kernels read it in tiles and cannot as it lies."""
        bias = self.expanded_bias
        if bias is None or plan is None or not plan.bias_in_tiles:
            return bias
        return aligned_bias(bias)
