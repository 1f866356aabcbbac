"""Attention over packed sequences: its two ops, which run attention with the spans of each query and key.

q [1, H, T, F], k [1, Hkv, S, F], v [1, Hkv, S, D]. Kernels read the spans on the device, so the host never
waits for the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.attention import (
    AttentionOpOptions,
    Spans,
    attention_backward,
    attention_forward,
    attention_results,
)
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import launch_on
from monoidreduce._ops.registry import SymInt, register
from monoidreduce._validate import mismatch

UNBOUNDED = (-1, -1)  # in place of a window: it is in the spans


def sequence_spans(
    q: Tensor,
    k: Tensor,
    starts: tuple[Tensor, Tensor],
    window: tuple[int, int],
    first: int = 0,
    tokens: int | None = None,
) -> Spans:
    """[T, 2] and [S, 2] int64: the span of each query, and the span of each key.

    A query's span is the first key that it sees and the key behind the last. A key's span is the same of
    the queries that see it.

    tokens: how many queries the sequences have room in, where q has only those from `first` on. Spans of all
    are made then, and cut, because a part of a sequence is not aligned with its keys as a sequence is.
    """
    queries, keys = q.shape[2], k.shape[2]
    tokens = queries if tokens is None else tokens
    of_queries, of_keys = (q.new_empty(lines, 2, dtype=torch.int64) for lines in (tokens, keys))
    for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True):
        if t.numel() > 0 and t.data_ptr() == 0:  # torch would convert it all the same
            raise TypeError(mismatch(name, "a tensor with memory of its own", type(t)))
    query_starts = starts[0].long().contiguous()
    key_starts = query_starts if starts[1] is starts[0] else starts[1].long().contiguous()
    _C.sequence_spans(of_queries, of_keys, query_starts, key_starts, *window, *launch_on(q))
    if queries == tokens:
        return Spans(of_queries, of_keys)
    return Spans(of_queries[first : first + queries], (of_keys - first).clamp_(0, queries))


def undefine(spans: Spans, *results: Tensor) -> None:
    """On a GPU, fills the results with NaN if cu_seqlens are not ascending or out of bounds. On the CPU that
    has raised an error before."""
    for result in results:
        if result.is_cuda and spans.rows is not None and spans.columns is not None:
            _C.undefine(result.view(-1), spans.rows if len(spans.rows) else spans.columns, *launch_on(result))


class VarlenOpOptions(NamedTuple):
    """The options of the op; scale to compensated as those of `attention`.

    first, tokens: q has the queries from `first` on, of so many tokens (`sequence_spans`).
    """

    scale: float | None
    softcap: float
    left: SymInt
    right: SymInt
    compensated: bool
    first: SymInt
    tokens: SymInt

    @property
    def of_attention(self) -> AttentionOpOptions:
        return AttentionOpOptions(self.scale, self.softcap, *UNBOUNDED, self.compensated)

    def spans(self, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Spans:
        starts = (cu_seqlens_q, cu_seqlens_k)
        return sequence_spans(q, k, starts, (self.left, self.right), self.first, self.tokens)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: VarlenOpOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = options.spans(q, k, cu_seqlens_q, cu_seqlens_k)
    out, lse, lse_low, out_low = attention_forward(q, k, v, None, sinks, options.of_attention, spans)
    undefine(spans, out, lse)
    return out, lse, lse_low, out_low


def varlen_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: VarlenOpOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return attention_results(q, k, v, None, sinks, options.of_attention)


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
    spans = options.spans(q, k, cu_seqlens_q, cu_seqlens_k)
    dq, dk, dv, _, dsinks = attention_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        None,
        sinks,
        out,
        lse,
        lse_low,
        out_low,
        options.of_attention,
        [*needed[:3], False, needed[3]],
        unrounded_gradients=unrounded_gradients,
        spans=spans,
    )
    gradients = [dq, dk, dv, dsinks]
    undefine(spans, *gradients)
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
    backward_options="bool unrounded_gradients=False",
)
