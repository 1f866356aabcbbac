"""The op `modified_attention`: attention with a user's score_mod and mask_mod, and `attend`."""

from __future__ import annotations

from typing import Any, NamedTuple

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

__all__ = ["Inputs", "Options", "backward", "forward", "results"]


class Inputs(NamedTuple):
    """The inputs of the op.

    Attributes:
        table, table_index: the captured tensors that the program gathers from.
        blocks: kinds of the blocks of a block mask.
        cu_seqlens_q, cu_seqlens_k: where packed sequences begin; q, k and v have one batch then.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    sinks: Tensor | None
    table_index: Tensor | None
    blocks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


class Options(NamedTuple):
    """The options of the op.

    Attributes:
        sizes: of the captured tensors. AOTInductor passes None for an empty list.
        left, right: the window; -1 is unbounded.
        block_rows, block_columns: of the blocks of a block mask.
        weights: whether the program gives weights (`attend`), not scores.
    """

    program: str
    sizes: list[int] | None
    scale: float | None
    left: int
    right: int
    block_rows: int
    block_columns: int
    weights: bool
    compensated: bool


def results(*arguments: Any) -> Results:
    """Memory for the results of a call of the op."""
    of, options = Inputs(*arguments[:9]), Options(*arguments[9:])
    return new_results(of.q, of.v, options.compensated, with_lse=not options.weights)


def _scores(of: Inputs, options: Options) -> ProgramScores:
    mask = band(options.left, options.right)
    if of.cu_seqlens_q is not None and of.cu_seqlens_k is not None:
        window = (options.left, options.right)
        mask = packed_mask(of.q, of.k, of.cu_seqlens_q, of.cu_seqlens_k, window)
    return ProgramScores(
        score_scale(of.q, options.scale),
        mask,
        options.program,
        of.table,
        of.table_index,
        options.sizes or [],
        None if of.blocks is None else of.blocks.expand(*of.q.shape[:2], -1, -1),
        options.block_rows,
        options.block_columns,
        options.weights,
    )


def forward(*arguments: Any) -> Results:
    """The results of a call of the op."""
    of, options = Inputs(*arguments[:9]), Options(*arguments[9:])
    scores, with_lse = _scores(of, options), not options.weights
    if of.q.is_cuda and _is_empty(of.q, of.k):
        sinks = score_sinks(of.q, of.sinks)
        found = _empty_results(of.q, of.v, sinks, options.compensated, with_lse)
    else:
        found = forward_pass(scores, of.q, of.k, of.v, of.sinks, options.compensated, with_lse=with_lse)
    out, lse, *_ = found
    scores.mask.undefine(out, lse)
    return found


def backward(*arguments: Any) -> list[Tensor]:
    """The gradients of q, k, v, table and sinks.

    arguments: upstream gradients of out and lse, inputs, results, options, and which of the inputs need a
    gradient.
    """
    of, options, saved = Inputs(*arguments[2:11]), Options(*arguments[15:24]), arguments[11:15]
    (grad_out, grad_lse), needed = arguments[:2], arguments[24]
    (out, lse, lse_low, _), scores = saved, _scores(of, options)
    if options.weights and grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [*needed[:3], False, needed[4]]
    of_table = of.table is not None and needed[3]
    if of.table is not None and of_table and kernels_sum(scores, of.q, of.k, of.v):
        scores = scores._replace(d_table=torch.zeros_like(of.table))
        wanted[0] = needed[0] or not any(needed[1:3])  # kernels that have nothing else to do do not run
    found = _gradients(scores, grad_out, grad_lse, of.q, of.k, of.v, of.sinks, saved, wanted)
    if not needed[0]:
        found[0] = no_gradient([of.q])
    if of_table:
        found[3] = table_gradient(scores, of.q, of.k, of.v, grad_out, grad_lse, lse, lse_low)
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
