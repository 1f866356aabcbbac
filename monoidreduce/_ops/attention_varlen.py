"""Attention over packed sequences: its op. It is attention under a mask of spans (`packed_mask`).

q [1, H, T, F], k [1, Hkv, S, F], v [1, Hkv, S, D].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from monoidreduce import _yards
from monoidreduce._ops.attention import differentiate
from monoidreduce._ops.attention_mask import packed_mask
from monoidreduce._ops.attention_passes import Results, forward_pass, new_results, score_scale
from monoidreduce._ops.attention_scores import BuiltInScores
from monoidreduce._ops.registry import Fold, SymInt, register

__all__: list[str] = []


class VarlenOpOptions(NamedTuple):
    """The options of the op.

    scale to compensated: as for `attention`; left and right count within each sequence.
    first, tokens: q holds the queries from `first` on, of this many (`packed_mask`).
    """

    scale: float | None
    softcap: float
    left: SymInt
    right: SymInt
    compensated: bool
    first: SymInt
    tokens: SymInt


def _scores(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: VarlenOpOptions
) -> BuiltInScores:
    scale, softcap, left, right, _, first, tokens = options
    mask = packed_mask(q, k, cu_seqlens_q, cu_seqlens_k, (left, right), first, tokens)
    return BuiltInScores(score_scale(q, scale), softcap, mask)


def varlen_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: VarlenOpOptions,
) -> Results:
    return new_results(q, v, options.compensated)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: VarlenOpOptions,
) -> Results:
    scores = _scores(q, k, cu_seqlens_q, cu_seqlens_k, options)
    out, lse, lse_low, out_low = forward_pass(scores, q, k, v, sinks, options.compensated)
    scores.mask.undefine(out, lse)
    return out, lse, lse_low, out_low


def varlen_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out_low: Tensor,
    options: VarlenOpOptions,
    needed: list[bool],
    unrounded_gradients: bool = False,
) -> list[Tensor]:
    scores = _scores(q, k, cu_seqlens_q, cu_seqlens_k, options)
    results, of_all = (out, lse, lse_low, out_low), [*needed[:3], False, needed[3]]
    dq, dk, dv, _, dsinks = differentiate(
        scores, grad_out, grad_lse, q, k, v, sinks, results, of_all, unrounded_gradients
    )
    gradients = [dq, dk, dv, dsinks]
    scores.mask.undefine(*gradients)
    return gradients


register(
    "attention_varlen",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    options=VarlenOpOptions,
    outputs="out, lse, lse_low, out_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low, out_low",
    constants="Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    forward=varlen_forward,
    fake=varlen_results,
    backward=varlen_backward,
    tangents=lambda *args: _yards.folds().varlen_tangents(*args),
    moves=lambda q, k, v, sinks, *_: sinks is None,
    fold=Fold(a="q", b="k", payload="v", joined=("sinks",)),
    backward_options="bool unrounded_gradients=False",
)
