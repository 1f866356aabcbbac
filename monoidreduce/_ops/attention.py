"""Attention: its two ops.

A log-sum-exp is kept in two words: `lse`, and in `lse_low` what was lost in rounding it. So is an output of
16 bits that is to be `compensated`: `out` and `out_low`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops import attention_wide
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulation_dtype,
    accumulator,
    allows_tf32,
    bias_gradient,
    first,
    gradient,
    launch,
    mapped,
    mapped_bias,
    new,
    padded,
    rounded,
    statistics,
)
from monoidreduce._ops.registry import register
from monoidreduce._ops.sinks import score_sinks

# So few keys that rounding the output shows in delta, the sum of P dP. Where one weight is almost 1, dS is a
# small difference of dP and delta. The backward pass then computes the output again, in two words.
FEW_KEYS = 128

# The keys that each query sees, and the queries that see each key, as `_C.sequence_spans` fills them; or None
# for a band.
Spans = tuple[Tensor, Tensor] | tuple[None, None]
NO_SPANS: Spans = (None, None)


def score_scale(q: Tensor, scale: float | None) -> float:
    return (q.shape[-1] or 1) ** -0.5 if scale is None else scale


def _score_bias(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def sums_bias_gradient(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Do kernels sum the derivatives by several scores for one element of the bias."""
    scores = q.shape[:3].numel() * k.shape[2]
    return bias is not None and bias.numel() < scores


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    gpu: _C.DeviceFacts | None = None,
    spans: Spans = NO_SPANS,
) -> _C.Plan:
    """bias: [B, H, M, N]. gpu: plans for it, wherever the tensors are."""
    results, mode = (None,) * 5, (False, allows_tf32(q), gpu)
    arguments: Any = (q, k, v, bias, None, *spans, *results, scale, softcap, left, right, *mode)
    return _C.plan_attention_forward(*arguments)


def plan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    grad_out: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    needed: list[bool],
    sums: bool,
    gpu: _C.DeviceFacts | None = None,
    spans: Spans = NO_SPANS,
) -> _C.Plan:
    """The same.

    needed: which gradients of q, k and v are wanted; if none, the plan is of all. sums: is one of the bias
    wanted that several scores share.
    """
    results = (None,) * 5  # of the forward pass
    mode = (torch.are_deterministic_algorithms_enabled(), allows_tf32(q), gpu)
    options, others = (scale, softcap, left, right, True), (bias if sums else None, None)  # d_sinks
    gradients = (t if wanted else None for t, wanted in zip((q, k, v), needed, strict=False))
    arguments: Any = (q, k, v, bias, None, *spans, grad_out, *results, *gradients, *others, None)
    arguments += (*options, *mode)
    return _C.plan_attention_backward(*arguments)


def readable(a: Tensor, payload: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """Tensors [B, H, rows, width] as tensor-core kernels read them, in a call with these widths."""
    return map(padded if (a.shape[3] | payload.shape[3]) % 8 else mapped, tensors)


def readable_result(out: Tensor) -> Tensor:
    """An output [B, H, M, width], or its low words, as backward passes read it: no width is padded."""
    return out.contiguous() if out.shape[3] % 8 else mapped(out)


def attention_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """compensated: out_low, which else is empty, is there beside an output of 16 bits."""
    *rows, _ = q.shape
    out, lse = q.new_empty(*rows, v.shape[3]), statistics(q, *rows)
    return out, lse, torch.empty_like(lse), low_words(out, compensated)


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
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
    spans: Spans = NO_SPANS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score_bias, options = _score_bias(q, k, bias), (score_scale(q, scale), softcap, left, right)
    width, plan, scratch, sinks = v.shape[3], None, None, score_sinks(q, sinks)
    if q.is_cuda and attention_wide.takes(q, k, v, bias, options, spans is not NO_SPANS):
        found = attention_results(q, k, v, bias, sinks, scale, softcap, left, right, compensated)
        _yards.folds().wide_attention.forward(q, k, v, sinks, options, found)
        return found
    if q.is_cuda:
        plan = plan_forward(q, k, v, score_bias, *options, spans=spans)
        if plan.tensor_cores:
            q, k, v = readable(q, v, q, k, v)
        if score_bias is not None and plan.bias_in_tiles:
            score_bias = mapped_bias(score_bias)
        if elements := plan.scratch:
            scratch = statistics(q, elements)
    found = attention_results(q, k, v, bias, sinks, scale, softcap, left, right, compensated)
    out, lse, lse_low, out_low = found
    filled = (out, lse, lse_low, present(out_low))
    arguments: Any = (q, k, v, score_bias, sinks, *spans, *filled, scratch, *options, *launch(q), plan)
    _C.attention_forward(*arguments)
    if v.shape[3] == width:
        return found
    return first(width, out), lse, lse_low, first(width, out_low) if out_low.numel() else out_low


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
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
    needed: list[bool],
    whole: bool = True,
    unrounded_gradients: bool = False,
    spans: Spans = NO_SPANS,
) -> list[Tensor]:
    lse, lse_low = lse.contiguous(), lse_low.contiguous()  # hooks on saved tensors return any strides
    if grad_out is None and q.is_cuda:  # tensor cores take it as that of attention to zeros, whatever v holds
        nothing = q.new_zeros((*q.shape[:3], 8))
        found = attention_backward(
            nothing,
            grad_lse,
            q,
            k,
            v.new_zeros((*v.shape[:3], 8)),
            bias,
            sinks,
            nothing,
            lse,
            lse_low,
            nothing[:0],
            scale,
            softcap,
            left,
            right,
            False,
            [*needed[:2], False, *needed[3:]],
            whole,
            unrounded_gradients,
            spans,
        )
        if needed[2]:
            found[2] = v.new_zeros(v.shape)
        return found
    score_bias, options = _score_bias(q, k, bias), (score_scale(q, scale), softcap, left, right)
    inputs, plan, scratch, low = (q, k, v, bias, sinks), None, None, present(out_low)
    sinks = score_sinks(q, sinks)
    wide = attention_wide.takes(q, k, v, bias, options, spans is not NO_SPANS) and not unrounded_gradients
    if wide and grad_out is not None:
        of_rows = (in_full(out, out_low), lse, lse_low)
        return rounded(
            _yards.folds().wide_attention.backward(
                grad_out, grad_lse, q, k, v, sinks, of_rows, options, needed
            ),
            inputs,
            needed,
        )
    gradients: list[Tensor | None]
    if q.is_cuda:
        sums = needed[3] and sums_bias_gradient(q, k, bias)
        plan = plan_backward(q, k, v, score_bias, grad_out, *options, needed, sums, spans=spans)
        scratch = statistics(q, plan.scratch)
    if plan is not None and grad_out is not None and plan.tensor_cores:
        if k.shape[2] <= FEW_KEYS and q.element_size() == 2 and low is None:
            out, _, _, low = attention_forward(q, k, v, bias, sinks, scale, softcap, left, right, True, spans)
        out, low = readable_result(out), None if low is None else readable_result(low)
        grad_out, q, k, v = readable(q, v, grad_out, q, k, v)
        if score_bias is not None and plan.bias_in_tiles:
            score_bias = mapped_bias(score_bias)
        makers = (accumulator if plan.adds_rows else new, new, new)
        computed = zip(makers, (q, k, v), plan.computed, strict=True)  # needed or not
        gradients = [make(t) if written else None for make, t, written in computed]
    else:
        of = zip((q, k, v), needed[:3], strict=True)
        gradients = [gradient(t, wanted, unrounded_gradients) for t, wanted in of]
    dq, dk, dv = gradients
    dbias = bias_gradient(bias, needed[3])
    dsinks = None if sinks is None or not needed[4] else torch.empty_like(sinks)
    residuals = (grad_out, grad_lse, out, lse, lse_low, low)
    to = (dq, dk, dv, _score_bias(q, k, dbias), dsinks)
    mode = (whole, *launch(q), plan)
    arguments: Any = (q, k, v, score_bias, sinks, *spans, *residuals, *to, scratch, *options, *mode)
    _C.attention_backward(*arguments)
    return rounded((dq, dk, dv, dbias, dsinks), inputs, needed, unrounded_gradients)


register(
    "attention",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks",
    options="float? scale, float softcap, SymInt left, SymInt right, bool compensated",
    outputs="out, lse, lse_low, out_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low, out_low",
    forward=attention_forward,
    fake=attention_results,
    backward=attention_backward,
    # Are k and v all keys that out and lse are of, or a slice of them; and see `UNROUNDED`.
    backward_options="bool whole=True, bool unrounded_gradients=False",
)
