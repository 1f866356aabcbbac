"""The op `modified_attention`: attention with a user's score_mod and mask_mod, and `attend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.attention_mask import band, packed_mask
from monoidreduce._ops.attention_passes import (
    Results,
    backward_pass,
    empty_low,
    forward_pass,
    in_full,
    new_results,
    score_scale,
)
from monoidreduce._ops.memory import empty_statistics, no_gradient, rounded_gradients
from monoidreduce._ops.sinks import score_sinks, sink_gradient
from monoidreduce.folds.program_scores import ProgramScores
from monoidreduce.folds.table_gradient import kernels_sum, table_gradient

__all__ = ["backward", "forward", "results"]


def results(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
    """Memory for the results. rest: the other arguments of the op, which end with `weights` and
    `compensated`."""
    *_, weights, compensated = rest
    return new_results(q, v, compensated, with_lse=not weights)


def _scores(
    q: Tensor,
    k: Tensor,
    table: Tensor | None,
    table_index: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    program: str,
    sizes: list[int],
    scale: float | None,
    left: int,
    right: int,
    block_rows: int,
    block_columns: int,
    weights: bool,
) -> ProgramScores:
    """From the arguments of the op."""
    mask = band(left, right)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        mask = packed_mask(q, k, cu_seqlens_q, cu_seqlens_k, (left, right))
    return ProgramScores(
        score_scale(q, scale),
        mask,
        program,
        table,
        table_index,
        sizes or [],  # programs of AOTInductor pass None for an empty list
        None if blocks is None else blocks.expand(q.shape[0], q.shape[1], -1, -1),
        block_rows,
        block_columns,
        weights,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    table_index: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    program: str,
    sizes: list[int],
    scale: float | None,
    left: int,
    right: int,
    block_rows: int,
    block_columns: int,
    weights: bool,
    compensated: bool,
) -> Results:
    scores = _scores(
        q,
        k,
        table,
        table_index,
        blocks,
        cu_seqlens_q,
        cu_seqlens_k,
        program,
        sizes,
        scale,
        left,
        right,
        block_rows,
        block_columns,
        weights,
    )
    if q.is_cuda and _is_empty(q, k):
        found = _empty_results(q, v, score_sinks(q, sinks), compensated, with_lse=not weights)
    else:
        found = forward_pass(scores, q, k, v, sinks, compensated, with_lse=not weights)
    out, lse, *_ = found
    scores.mask.undefine(out, lse)
    return found


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    table_index: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    out_low: Tensor,
    program: str,
    sizes: list[int],
    scale: float | None,
    left: int,
    right: int,
    block_rows: int,
    block_columns: int,
    weights: bool,
    compensated: bool,
    needed: list[bool],
) -> list[Tensor]:
    scores = _scores(
        q,
        k,
        table,
        table_index,
        blocks,
        cu_seqlens_q,
        cu_seqlens_k,
        program,
        sizes,
        scale,
        left,
        right,
        block_rows,
        block_columns,
        weights,
    )
    if weights and grad_out is None:
        grad_out = torch.zeros_like(out)
    saved = (out, lse, lse_low, out_low)
    wanted = [*needed[:3], False, needed[4]]
    if table is not None and needed[3] and kernels_sum(scores, q, k):
        scores = scores._replace(d_table=torch.zeros_like(table))
        wanted[0] = needed[0] or not any(needed[1:3])  # kernels that have nothing else to do do not run
    found = _gradients(scores, grad_out, grad_lse, q, k, v, sinks, saved, wanted)
    if not needed[0]:
        found[0] = no_gradient([q])
    if table is not None and needed[3]:
        found[3] = table_gradient(scores, q, k, v, grad_out, grad_lse, lse, lse_low)
    scores.mask.undefine(*found)
    return found


def _gradients(
    scores: ProgramScores,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    saved: Results,
    needed: list[bool],
) -> list[Tensor]:
    """`backward_pass`, beside it what the kernels for programs lack on a GPU."""
    if not q.is_cuda:
        return backward_pass(scores, grad_out, grad_lse, q, k, v, sinks, saved, needed)
    dsinks = None
    if sinks is not None and needed[4] and (_is_empty(q, k) or scores.scale == 0):
        # No kernel runs, or (scale 0) the kernels know delta times the scale only.
        dsinks = _sink_gradient(sinks, grad_out, grad_lse, saved)
        needed = [*needed[:4], False]
    if _is_empty(q, k):
        zeros = [torch.zeros_like(t) for t in (q, k, v)]
        found = rounded_gradients((*zeros, None, None), (q, k, v, None, sinks), needed)
    else:
        grad_out = torch.zeros_like(saved[0]) if grad_out is None else grad_out
        found = backward_pass(scores, grad_out, grad_lse, q, k, v, sinks, saved, needed)
    if dsinks is not None:
        found[4] = dsinks
    return found


def _sink_gradient(sinks: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None, saved: Results) -> Tensor:
    out, lse, lse_low, out_low = saved
    of_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if grad_out is not None:
        of_lse = of_lse - (grad_out.to(lse.dtype) * in_full(out, out_low)).sum(-1)
    return sink_gradient(sinks.to(lse.dtype), lse, lse_low, of_lse).to(sinks.dtype)


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether there are no scores, so that no kernel runs on a GPU."""
    return not (q.shape[:3].numel() and k.shape[2])


def _empty_results(q: Tensor, v: Tensor, sinks: Tensor | None, compensated: bool, with_lse: bool) -> Results:
    """The results of queries that see no key. sinks: [H], in the accumulation dtype."""
    *rows, _ = q.shape
    out = q.new_zeros((*rows, v.shape[3]))
    lse = empty_statistics(q, *rows) if with_lse else empty_statistics(q, 0)
    if sinks is None or not with_lse:
        lse.fill_(-torch.inf)
    else:
        lse.copy_(sinks[:, None].expand_as(lse))
    return out, lse, torch.zeros_like(lse), empty_low(out, compensated).zero_()
