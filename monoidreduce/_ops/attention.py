"""Attention: its two ops.

A log-sum-exp is kept in two words: `lse`, and in `lse_low` what was lost in rounding it. So is an output of
16 bits that is to be `compensated`: `out` and `out_low`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops import attention_wide
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    aligned,
    aligned_bias,
    allows_tf32,
    cut_to_width,
    empty_dense,
    empty_statistics,
    launch_on,
    new_bias_gradient,
    new_gradient,
    padded,
    rounded_gradients,
)
from monoidreduce._ops.registry import SymInt, register
from monoidreduce._ops.sinks import score_sinks

# So few keys that rounding the output shows in delta, the sum of P dP. Where one weight is almost 1, dS is a
# small difference of dP and delta. The backward pass then computes the output again, in two words.
FEW_KEYS = 128


class Spans(NamedTuple):
    """The keys that each query sees, and the queries that see each key, as `_C.sequence_spans` writes them.

    rows: [T, 2], columns: [S, 2]. None for a band, whose bounds are numbers (`Scores`).
    """

    rows: Tensor | None
    columns: Tensor | None


NO_SPANS = Spans(None, None)


class Scores(NamedTuple):
    """The scores of a call, as kernels take them.

    softcap: 0 for none. left, right: a query sees so many keys before and after the one that it is aligned
        with; -1 is all.
    """

    scale: float
    softcap: float
    left: int
    right: int


class AttentionOpOptions(NamedTuple):
    """The options of the op.

    scale: None is 1 / sqrt(width).
    compensated: out_low is wanted, what an output of 16 bits lost in rounding.
    """

    scale: float | None
    softcap: float
    left: SymInt
    right: SymInt
    compensated: bool


def score_scale(q: Tensor, scale: float | None) -> float:
    return (q.shape[-1] or 1) ** -0.5 if scale is None else scale


def _score_bias(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """[B, H, M, N], without a copy."""
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def sums_bias_gradient(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Whether several scores share an element of the bias, so that kernels sum its gradient."""
    scores = q.shape[:3].numel() * k.shape[2]
    return bias is not None and bias.numel() < scores


# The results of the forward pass and its scratch, on which no plan depends.
_NO_RESULTS = (None, None, None, None, None)


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scores: Scores,
    spans: Spans = NO_SPANS,
) -> _C.Plan:
    """bias: [B, H, M, N]."""
    sinks, deterministic = None, False
    return _C.plan_attention_forward(
        q,
        k,
        v,
        bias,
        sinks,
        spans.rows,
        spans.columns,
        *_NO_RESULTS,
        *scores,
        deterministic,
        allows_tf32(q),
    )


def plan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    grad_out: Tensor | None,
    scores: Scores,
    needed: list[bool],
    sums: bool,
    spans: Spans = NO_SPANS,
) -> _C.Plan:
    """Arguments as in `plan_forward`.

    needed: which gradients of q, k and v are wanted; if none, the plan is of all.
    sums: the gradient of a bias is wanted, and several scores share an element of it.
    """
    sinks = dsinks = scratch = None
    dq, dk, dv = (t if wanted else None for t, wanted in zip((q, k, v), needed, strict=False))
    return _C.plan_attention_backward(
        q,
        k,
        v,
        bias,
        sinks,
        spans.rows,
        spans.columns,
        grad_out,
        *_NO_RESULTS,
        dq,
        dk,
        dv,
        bias if sums else None,
        dsinks,
        scratch,
        *scores,
        True,  # whole
        torch.are_deterministic_algorithms_enabled(),
        allows_tf32(q),
    )


def readable(a: Tensor, payload: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """Tensors [B, H, rows, width] as tensor-core kernels read them, in a call with these widths."""
    return map(padded if (a.shape[3] | payload.shape[3]) % 8 else aligned, tensors)


def readable_result(out: Tensor) -> Tensor:
    """An output [B, H, M, width], or its low words, as backward passes read it: no width is padded."""
    return out.contiguous() if out.shape[3] % 8 else aligned(out)


def attention_results(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: AttentionOpOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse in two words, and out_low: for an output of 16 bits if it is `compensated`, else empty."""
    *rows, _ = q.shape
    out, lse = q.new_empty(*rows, v.shape[3]), empty_statistics(q, *rows)
    return out, lse, torch.empty_like(lse), low_words(out, options.compensated)


def low_words(out: Tensor, compensated: bool) -> Tensor:
    """For what rounding `out` loses: as large, or empty where nothing is kept."""
    kept = compensated and out.element_size() == 2
    return torch.empty_like(out) if kept else out.new_empty(0, 0, 0, 0)


def present(low: Tensor) -> Tensor | None:
    return low if low.numel() else None


def in_full(out: Tensor, low: Tensor) -> Tensor:
    """Both words of an output of 16 bits, in the accumulation dtype."""
    return out.to(accumulation_dtype(out.dtype)) + low if low.shape == out.shape else out


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    options: AttentionOpOptions,
    spans: Spans = NO_SPANS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, softcap, left, right, _ = options
    scores = Scores(score_scale(q, scale), softcap, left, right)
    score_bias = None if bias is None else _score_bias(q, k, bias)
    width, plan, scratch, sinks = v.shape[3], None, None, score_sinks(q, sinks)
    if q.is_cuda and attention_wide.takes(q, k, v, bias, scores, spans is not NO_SPANS):
        results = attention_results(q, k, v, bias, sinks, options)
        _yards.folds().wide_attention.forward(q, k, v, sinks, scores, results)
        return results
    if q.is_cuda:
        plan = plan_forward(q, k, v, score_bias, scores, spans=spans)
        if plan.tensor_cores:
            q, k, v = readable(q, v, q, k, v)
        if score_bias is not None and plan.bias_in_tiles:
            score_bias = aligned_bias(score_bias)
        if elements := plan.scratch:
            scratch = empty_statistics(q, elements)
    out, lse, lse_low, out_low = attention_results(q, k, v, bias, sinks, options)
    _C.attention_forward(
        q,
        k,
        v,
        score_bias,
        sinks,
        spans.rows,
        spans.columns,
        out,
        lse,
        lse_low,
        present(out_low),
        scratch,
        *scores,
        *launch_on(q),
        plan,
    )
    if v.shape[3] == width:
        return out, lse, lse_low, out_low
    return (
        cut_to_width(width, out),
        lse,
        lse_low,
        cut_to_width(width, out_low) if out_low.numel() else out_low,
    )


def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out_low: Tensor,
    options: AttentionOpOptions,
    needed: list[bool],
    whole: bool = True,
    unrounded_gradients: bool = False,
    spans: Spans = NO_SPANS,
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()  # hooks on saved tensors return any strides
    inputs = (q, k, v, bias, sinks)
    if grad_out is None and q.is_cuda:
        # Only lse has an upstream gradient, and lse does not depend on v. Attention over values of zero has
        # the same gradients of q and k, and is a call that the tensor-core kernels take.
        zeros = q.new_zeros((*q.shape[:3], 8))
        gradients = attention_backward(
            zeros,
            grad_lse,
            q,
            k,
            v.new_zeros((*v.shape[:3], 8)),
            bias,
            sinks,
            zeros,
            lse,
            lse_low,
            zeros[:0],
            options._replace(compensated=False),
            [*needed[:2], False, *needed[3:]],
            whole,
            unrounded_gradients,
            spans,
        )
        if needed[2]:
            gradients[2] = v.new_zeros(v.shape)
        return gradients
    scale, softcap, left, right, _ = options
    scores = Scores(score_scale(q, scale), softcap, left, right)
    score_bias = None if bias is None else _score_bias(q, k, bias)
    plan, scratch, low, sinks = None, None, present(out_low), score_sinks(q, sinks)
    may_be_wide = q.is_cuda and grad_out is not None and not unrounded_gradients
    if may_be_wide and attention_wide.takes(q, k, v, bias, scores, spans is not NO_SPANS):
        residuals = (in_full(out, out_low), lse, lse_low)
        wide_attention = _yards.folds().wide_attention
        by_folds = wide_attention.backward(grad_out, grad_lse, q, k, v, sinks, residuals, scores, needed)
        return rounded_gradients(by_folds, inputs, needed)
    if q.is_cuda:
        sums = needed[3] and sums_bias_gradient(q, k, bias)
        plan = plan_backward(q, k, v, score_bias, grad_out, scores, needed, sums, spans=spans)
        scratch = empty_statistics(q, plan.scratch)
    if plan is not None and grad_out is not None and plan.tensor_cores:
        if k.shape[2] <= FEW_KEYS and q.element_size() == 2 and low is None:
            again = options._replace(compensated=True)
            out, _, _, low = attention_forward(q, k, v, bias, sinks, again, spans)
        out, low = readable_result(out), None if low is None else readable_result(low)
        grad_out, q, k, v = readable(q, v, grad_out, q, k, v)
        if score_bias is not None and plan.bias_in_tiles:
            score_bias = aligned_bias(score_bias)
        makers = (accumulator if plan.adds_rows else empty_dense, empty_dense, empty_dense)
        computed = zip(makers, (q, k, v), plan.computed, strict=True)  # needed or not
        dq, dk, dv = (make(t) if written else None for make, t, written in computed)
    else:
        of = zip((q, k, v), needed[:3], strict=True)
        dq, dk, dv = (new_gradient(t, wanted, unrounded_gradients) for t, wanted in of)
    dbias = new_bias_gradient(bias, needed[3])
    dsinks = None if sinks is None or not needed[4] else torch.empty_like(sinks)
    _C.attention_backward(
        q,
        k,
        v,
        score_bias,
        sinks,
        spans.rows,
        spans.columns,
        grad_out,
        grad_lse,
        out,
        lse,
        lse_low,
        low,
        dq,
        dk,
        dv,
        None if dbias is None else _score_bias(q, k, dbias),
        dsinks,
        scratch,
        *scores,
        whole,
        *launch_on(q),
        plan,
    )
    return rounded_gradients((dq, dk, dv, dbias, dsinks), inputs, needed, unrounded_gradients)


register(
    "attention",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks",
    options=AttentionOpOptions,
    outputs="out, lse, lse_low, out_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low, out_low",
    forward=attention_forward,
    fake=attention_results,
    backward=attention_backward,
    # whole: k and v are all keys that out and lse are of, not a slice of them. And see `UNROUNDED`.
    backward_options="bool whole=True, bool unrounded_gradients=False",
)
