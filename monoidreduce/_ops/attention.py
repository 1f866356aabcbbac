"""Attention: its op, which chooses between resident kernels and those for wide heads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops import attention_wide
from monoidreduce._ops.attention_mask import band
from monoidreduce._ops.attention_passes import (
    Results,
    backward_pass,
    forward_pass,
    in_full,
    new_results,
    score_scale,
)
from monoidreduce._ops.attention_scores import BuiltInScores
from monoidreduce._ops.memory import rounded_gradients
from monoidreduce._ops.registry import Fold, SymInt, register
from monoidreduce._ops.sinks import score_sinks

__all__ = ["AttentionOpOptions", "differentiate"]


class AttentionOpOptions(NamedTuple):
    """The options of the op.

    scale: None is 1 / sqrt(width).
    softcap: 0 for none.
    left, right: see `Mask` (attention_mask.py).
    compensated: out_low is wanted, what rounding an output to 16 bits has lost.
    """

    scale: float | None
    softcap: float
    left: SymInt
    right: SymInt
    compensated: bool


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, options: AttentionOpOptions, whole: bool = True
) -> BuiltInScores:
    scale, softcap, left, right, _ = options
    expanded = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return BuiltInScores(score_scale(q, scale), softcap, band(left, right), bias, expanded, whole)


def attention_results(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: AttentionOpOptions
) -> Results:
    return new_results(q, v, options.compensated)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    options: AttentionOpOptions,
) -> Results:
    scores = _scores(q, k, bias, options)
    if q.is_cuda and attention_wide.takes(q, k, v, scores):
        results = new_results(q, v, options.compensated)
        wide = _yards.folds().wide_attention
        wide.forward(q, k, v, score_sinks(q, sinks), scores.scale, scores.mask, results)
        return results
    return forward_pass(scores, q, k, v, sinks, options.compensated)


def differentiate(
    scores: BuiltInScores,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    results: Results,
    needed: list[bool],
    unrounded: bool,
) -> list[Tensor]:
    """`backward_pass`, or the kernels for wide heads."""
    if grad_out is None and q.is_cuda:
        # Only lse has an upstream gradient, and lse does not depend on v. Attention over values of zero has
        # the same gradients of q and k, and is a call that the tensor-core kernels take.
        zeros = q.new_zeros((*q.shape[:3], 8))
        gradients = differentiate(
            scores,
            zeros,
            grad_lse,
            q,
            k,
            v.new_zeros((*v.shape[:3], 8)),
            sinks,
            (zeros, results[1], results[2], zeros[:0]),
            [*needed[:2], False, *needed[3:]],
            unrounded,
        )
        if needed[2]:
            gradients[2] = v.new_zeros(v.shape)
        return gradients
    if q.is_cuda and not unrounded and attention_wide.takes(q, k, v, scores):
        out, lse, lse_low, out_low = results
        saved = (in_full(out, out_low), lse.contiguous(), lse_low.contiguous())
        wide = _yards.folds().wide_attention
        gradients = wide.backward(
            grad_out, grad_lse, q, k, v, score_sinks(q, sinks), saved, scores.scale, scores.mask, needed
        )
        return rounded_gradients(gradients, (q, k, v, scores.bias, sinks), needed)
    return backward_pass(scores, grad_out, grad_lse, q, k, v, sinks, results, needed, unrounded)


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
) -> list[Tensor]:
    scores, results = _scores(q, k, bias, options, whole), (out, lse, lse_low, out_low)
    return differentiate(scores, grad_out, grad_lse, q, k, v, sinks, results, needed, unrounded_gradients)


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
    tangents=lambda *args: _yards.folds().attention_tangents(*args),
    moves=lambda q, k, v, bias, sinks, *_: bias is None and sinks is None,
    fold=Fold(a="q", b="k", payload="v", joined=("sinks",)),
    # whole: see `BuiltInScores`. unrounded_gradients: see `UNROUNDED`.
    backward_options="bool whole=True, bool unrounded_gradients=False",
)
