"""Attention with score_mod and mask_mod on a GPU, by kernels compiled for the user's functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.attention import (
    FEW_KEYS,
    NO_SPANS,
    Spans,
    in_full,
    low_words,
    present,
    readable,
    readable_result,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import (
    accumulator,
    cut_to_width,
    empty_dense,
    empty_statistics,
    launch_on,
    new_gradient,
)
from monoidreduce._ops.sinks import sink_gradient
from monoidreduce.folds.cuda import kernels
from monoidreduce.folds.program.integers import most_numbers

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]


class Options(NamedTuple):
    """The scores of a call. block_rows, block_columns: queries and keys of a block of `blocks`.

    weights: the program makes weights of scores, as for `attend`.
    """

    scale: float
    left: int
    right: int
    block_rows: int = 1
    block_columns: int = 1
    weights: bool = False


def kernel_of(
    program: str, which: str, q: Tensor, v: Tensor, spans: Spans, options: Options, plan: _C.Plan
) -> int:
    """The handle of the kernel of a pass. which: see `kernels.compiled_scores`."""
    if not kernels.is_available():
        raise RuntimeError(
            "score_mod, mask_mod, weight: on a GPU their kernels are compiled by NVRTC, and there is none: "
            "pip install nvidia-cuda-nvrtc"
        )

    width = max(q.shape[3], v.shape[3])
    packed = spans.rows is not None
    scale, weights, device = options.scale, options.weights, q.device.index
    most = most_numbers("q, k", *q.shape[:3], v.shape[2])
    return kernels.scores_kernel(
        program, which, packed, q.dtype, width, plan.tier, scale, weights, most, device
    )


def is_empty(q: Tensor, k: Tensor) -> bool:
    return not (q.shape[:3].numel() and k.shape[2])


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    spans: Spans = NO_SPANS,
    blocks: Tensor | None = None,
) -> _C.Plan:
    """The plan of the forward pass."""
    return _C.plan_modified_attention_fold(
        q,
        k,
        v,
        blocks=blocks,
        row_spans=spans.rows,
        column_spans=spans.columns,
        scale=options.scale,
        left=options.left,
        right=options.right,
        block_rows=options.block_rows,
        block_columns=options.block_columns,
    )


def plan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    spans: Spans = NO_SPANS,
    blocks: Tensor | None = None,
) -> _C.Plan:
    """The plan of the backward pass; arguments as in `plan_forward`."""
    return _C.plan_modified_attention_pull(
        q,
        k,
        v,
        blocks=blocks,
        row_spans=spans.rows,
        column_spans=spans.columns,
        scale=options.scale,
        left=options.left,
        right=options.right,
        block_rows=options.block_rows,
        block_columns=options.block_columns,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor | None, Tensor | None],
    blocks: Tensor | None,
    sinks: Tensor | None,
    spans: Spans,
    program: str,
    sizes: list[int],
    options: Options,
    compensated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, lse_low and out_low, as the op returns them. sinks: [H] in the accumulation dtype."""
    *rows, _ = q.shape
    width, lse = v.shape[3], empty_statistics(q, *rows)
    if is_empty(q, k):
        out = q.new_zeros((*rows, width))
        lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None].expand_as(lse))
        return out, lse, torch.zeros_like(lse), low_words(out, compensated).zero_()
    plan = plan_forward(q, k, v, options, spans=spans, blocks=blocks)
    if plan.tensor_cores:
        q, k, v = readable(q, v, q, k, v)
    out, lse_low = q.new_empty(*rows, v.shape[3]), torch.empty_like(lse)
    out_low = low_words(out, compensated)
    kernel = kernel_of(program, kernels.FORWARD, q, v, spans, options, plan)
    table, table_index = tables
    _C.modified_attention_fold(
        q,
        k,
        v,
        table,
        table_index,
        blocks,
        sinks,
        spans.rows,
        spans.columns,
        out,
        lse,
        lse_low,
        present(out_low),
        present(empty_statistics(q, plan.scratch)),
        kernel,
        sizes,
        *options,
        *launch_on(q),
        plan,
    )
    if v.shape[3] != width:
        out, out_low = cut_to_width(width, out), cut_to_width(width, out_low) if out_low.numel() else out_low
    return out, lse, lse_low, out_low


def backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor | None, Tensor | None],
    blocks: Tensor | None,
    sinks: Tensor | None,
    spans: Spans,
    residuals: tuple[Tensor, Tensor, Tensor, Tensor | None],
    program: str,
    sizes: list[int],
    options: Options,
    dsinks: Tensor | None,
    needed: list[bool],
) -> list[Tensor | None]:
    """The gradients of q, k and v; the gradient of the sinks is written to dsinks if that is given.

    needed: which of the three gradients are needed; others may be returned too.
    """
    out, lse, lse_low, low = residuals
    if sinks is not None and dsinks is not None and (is_empty(q, k) or options.scale == 0):
        # The kernels would not run, or (scale 0) only know delta times the scale.
        centre = torch.zeros_like(lse) if grad_lse is None else grad_lse
        if grad_out is not None:
            in_both = out if low is None else in_full(out, low)
            centre = centre - (grad_out.to(lse.dtype) * in_both).sum(-1)
        dsinks.copy_(sink_gradient(sinks, lse, lse_low, centre))
        dsinks = None
    if is_empty(q, k):
        return [torch.zeros_like(t) for t in (q, k, v)]
    if options.weights:  # `attend` has no lse, and its kernels do not read it
        lse = lse_low = empty_statistics(q, *q.shape[:3]).zero_()
    plan = plan_backward(q, k, v, options, spans=spans, blocks=blocks)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    found: list[Tensor | None] = [
        new_gradient(t, wanted) for t, wanted in zip((q, k, v), needed, strict=True)
    ]
    if low is None and q.element_size() == 2 and k.shape[2] <= FEW_KEYS and not options.weights:
        out, _, _, low = forward(q, k, v, tables, blocks, sinks, spans, program, sizes, options, True)
    if plan.tensor_cores:
        out, low = readable_result(out), None if low is None else readable_result(low)
        grad_out, q, k, v = readable(q, v, grad_out, q, k, v)
        found = [accumulator(q), empty_dense(k), empty_dense(v)]
    which = kernels.BACKWARD_IN_TURN if plan.in_turn else kernels.BACKWARD
    kernel = kernel_of(program, which, q, v, spans, options, plan)
    (table, table_index), (dq, dk, dv) = tables, found
    _C.modified_attention_pull(
        q,
        k,
        v,
        table,
        table_index,
        blocks,
        sinks,
        spans.rows,
        spans.columns,
        grad_out,
        grad_lse,
        out,
        lse.contiguous(),
        lse_low.contiguous(),
        low,
        dq,
        dk,
        dv,
        dsinks,
        empty_statistics(q, plan.scratch),
        kernel,
        sizes,
        *options,
        *launch_on(q),
        plan,
    )
    return found
