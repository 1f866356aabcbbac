"""The forward and the backward pass of attention, which are the same for all kinds of scores.

A pass makes a plan, pads operands where tensor cores need it, allocates results and scratch memory, calls the
kernels, and cuts and rounds what they wrote. Which kernels these are, and what they take beside q, k and v,
is said by `Scores`: attention_scores.py for a bias and a softcap, folds/program_scores.py for a user's
functions.

A log-sum-exp has two words, `lse` and `lse_low`: the second is what rounding the first has lost. So has a
`compensated` output in 16 bits: `out` and `out_low`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    aligned,
    cut_to_width,
    empty_dense,
    empty_statistics,
    empty_sums,
    new_bias_gradient,
    new_gradient,
    padded,
    rounded_gradients,
)
from monoidreduce._ops.sinks import score_sinks

__all__ = [
    "BackwardTensors",
    "Results",
    "Scores",
    "backward_pass",
    "empty_low",
    "forward_pass",
    "in_full",
    "new_results",
    "or_none",
    "score_scale",
]

# With at most this many keys, rounding `out` to 16 bits shows in delta = sum(P dP) = <grad_out, out>: where
# one probability is almost 1, dS = P (dP - delta) is a small difference. The backward pass then computes the
# output again, in two words.
FEW_KEYS = 128

# out, lse, lse_low and out_low, as the ops return them.
Results: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass: what its kernels read (q to out_low), and what they write (from dq on).

    A gradient is None if it is not computed. grad_out, grad_lse: None if they are 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    grad_out: Tensor | None
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    lse_low: Tensor
    out_low: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None
    scratch: Tensor | None


class Scores(Protocol):
    """How scores are made of dot products, and which keys a query sees."""

    @property
    def bias(self) -> Tensor | None:
        """A tensor that is added to scores and may need a gradient."""

    def plan_forward(self, q: Tensor, k: Tensor, v: Tensor) -> _C.Plan: ...

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None, needed: list[bool]
    ) -> _C.Plan:
        """needed: of q, k, v, bias and sinks."""

    def recomputes_out(self, plan: _C.Plan) -> bool:
        """Whether the backward pass of few keys computes a 16-bit output again (`FEW_KEYS`)."""

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
        """Call the kernels, or the CPU engine if there is no plan.

        sinks: [H], in the accumulation dtype. out_low: None if it is not wanted. scratch: of the size that
        the plan asks for; None if that is 0.
        """

    def call_backward(self, t: BackwardTensors, plan: _C.Plan | None) -> None: ...


def score_scale(q: Tensor, scale: float | None) -> float:
    """The factor of dot products: `scale`, by default 1 / sqrt(width)."""
    return (q.shape[-1] or 1) ** -0.5 if scale is None else scale


def new_results(q: Tensor, v: Tensor, compensated: bool, with_lse: bool = True) -> Results:
    """Memory for the results. Without lse its tensors are empty."""
    *rows, _ = q.shape
    out = q.new_empty(*rows, v.shape[3])
    lse = empty_statistics(q, *rows) if with_lse else empty_statistics(q, 0)
    return out, lse, torch.empty_like(lse), empty_low(out, compensated)


def empty_low(out: Tensor, compensated: bool) -> Tensor:
    """Memory for the low word of `out`; without elements unless out has 16 bits and is `compensated`."""
    wanted = compensated and out.element_size() == 2
    return torch.empty_like(out) if wanted else out.new_empty(0, 0, 0, 0)


def or_none(low: Tensor) -> Tensor | None:
    """The tensor; None if it has no elements, as kernels take it."""
    return low if low.numel() else None


def in_full(out: Tensor, low: Tensor) -> Tensor:
    """The sum of both words of an output of 16 bits, in the accumulation dtype; other outputs as they are."""
    return out.to(accumulation_dtype(out.dtype)) + low if low.shape == out.shape else out


def _readable(a: Tensor, payload: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """The tensors [B, H, rows, width], or copies, as tensor-core kernels read them.

    a, payload: tensors with the two widths of the call.
    """
    return map(padded if (a.shape[3] | payload.shape[3]) % 8 else aligned, tensors)


def _readable_result(out: Tensor) -> Tensor:
    """`out` or its low word, or a copy, as backward kernels read it: its width is never padded."""
    return out.contiguous() if out.shape[3] % 8 else aligned(out)


def forward_pass(
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    compensated: bool,
    with_lse: bool = True,
) -> Results:
    """Attention of q [B, H, M, F] over k [B, Hkv, N, F] and v [B, Hkv, N, D].

    sinks: [H], the score of one more key for each head, of value 0. compensated: out_low is wanted.
    """
    values, plan, scratch = v, None, None
    if sinks is not None:
        sinks = score_sinks(q, sinks)
    if q.is_cuda:
        plan = scores.plan_forward(q, k, v)
        if plan.tensor_cores:
            q, k, v = _readable(q, v, q, k, v)
        if elements := plan.scratch:
            scratch = empty_statistics(q, elements)
    out, lse, lse_low, out_low = new_results(q, v, compensated, with_lse)
    scores.call_forward(q, k, v, sinks, out, lse, lse_low, or_none(out_low), scratch, plan)
    if v is values or v.shape[3] == values.shape[3]:
        return out, lse, lse_low, out_low
    width = values.shape[3]
    out_low = cut_to_width(width, out_low) if out_low.numel() else out_low
    return cut_to_width(width, out), lse, lse_low, out_low


def backward_pass(
    scores: Scores,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    results: Results,
    needed: list[bool],
    unrounded: bool = False,
) -> list[Tensor]:
    """The gradients of q, k, v, the bias of the scores, and sinks.

    grad_out: on a GPU, not None. results: of the forward pass. needed: which gradients; the others are empty.
    unrounded: gradients stay in the dtype in which they were summed.
    """
    out, lse, lse_low, out_low = results
    lse, lse_low = lse.contiguous(), lse_low.contiguous()  # hooks on saved tensors return any strides
    bias, plan, scratch, low = scores.bias, None, None, or_none(out_low)
    inputs, sinks = (q, k, v, bias, sinks), score_sinks(q, sinks)
    if q.is_cuda:
        plan = scores.plan_backward(q, k, v, grad_out, needed)
        is_rounded = low is None and q.element_size() == 2
        if is_rounded and k.shape[2] <= FEW_KEYS and scores.recomputes_out(plan):
            out, _, _, low = forward_pass(scores, q, k, v, sinks, compensated=True)
        scratch = empty_statistics(q, plan.scratch)
    if plan is not None and plan.tensor_cores and grad_out is not None:
        out, low = _readable_result(out), None if low is None else _readable_result(low)
        grad_out, q, k, v = _readable(q, v, grad_out, q, k, v)
        makers = (empty_sums if plan.adds_rows else empty_dense, empty_dense, empty_dense)
        computed = zip(makers, (q, k, v), plan.computed, strict=True)  # needed or not
        dq, dk, dv = (make(t) if written else None for make, t, written in computed)
    else:
        dq = new_gradient(q, needed[0], unrounded)
        dk = new_gradient(k, needed[1], unrounded)
        dv = new_gradient(v, needed[2], unrounded)
    dbias = new_bias_gradient(bias, needed[3])
    dsinks = None if sinks is None or not needed[4] else torch.empty_like(sinks)
    tensors = BackwardTensors(
        q,
        k,
        v,
        sinks,
        grad_out,
        grad_lse,
        out,
        lse,
        lse_low,
        low,
        dq,
        dk,
        dv,
        dbias,
        dsinks,
        scratch,
    )
    scores.call_backward(tensors, plan)
    return rounded_gradients((dq, dk, dv, dbias, dsinks), inputs, needed, unrounded)
