"""Attention over packed sequences: its two ops, which run attention with the spans of each query and key.

q [1, H, T, F], k [1, Hkv, S, F], v [1, Hkv, S, D]. Kernels read the spans on the device, so the host never
waits for the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.attention import Spans, attention_backward, attention_forward, attention_results
from monoidreduce._ops.engine import _C
from monoidreduce._ops.memory import launch
from monoidreduce._ops.registry import register
from monoidreduce._validate import mismatch

UNBOUNDED = (-1, -1)  # in place of a window: it is in the spans


def sequence_spans(
    q: Tensor,
    k: Tensor,
    starts: tuple[Tensor, Tensor],
    window: tuple[int, int],
    first: int = 0,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
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
    _C.sequence_spans(of_queries, of_keys, query_starts, key_starts, *window, *launch(q))
    if queries == tokens:
        return of_queries, of_keys
    return of_queries[first : first + queries], (of_keys - first).clamp_(0, queries)


def undefine(spans: Spans, *results: Tensor) -> None:
    """On a GPU all becomes NaN if starts of sequences are not ascending or out of bounds. On the CPU that is
    an error before."""
    of_queries, of_keys = spans
    for result in results:
        if result.is_cuda and of_queries is not None and of_keys is not None:
            _C.undefine(result.view(-1), of_queries if len(of_queries) else of_keys, *launch(result))


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
    first: int,
    tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = sequence_spans(q, k, (cu_seqlens_q, cu_seqlens_k), (left, right), first, tokens)
    options = (scale, softcap, *UNBOUNDED, compensated)
    out, lse, lse_low, out_low = attention_forward(q, k, v, None, sinks, *options, spans)
    undefine(spans, out, lse)
    return out, lse, lse_low, out_low


def varlen_results(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, compensated, _, _ = rest
    return attention_results(q, k, v, None, sinks, None, 0.0, *UNBOUNDED, bool(compensated))


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
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    compensated: bool,
    first: int,
    tokens: int,
    needed: list[bool],
    unrounded_gradients: bool = False,
) -> list[Tensor]:
    spans = sequence_spans(q, k, (cu_seqlens_q, cu_seqlens_k), (left, right), first, tokens)
    *found, _, dsinks = attention_backward(
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
        scale,
        softcap,
        *UNBOUNDED,
        compensated,
        [*needed[:3], False, needed[3]],
        unrounded_gradients=unrounded_gradients,
        spans=spans,
    )
    found.append(dsinks)
    undefine(spans, *found)
    return found


register(
    "attention_varlen",
    inputs="Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    options="float? scale, float softcap, SymInt left, SymInt right, bool compensated, "
    "SymInt first, SymInt tokens",  # q may have a part of all queries, see `sequence_spans`
    outputs="out, lse, lse_low, out_low",
    differentiable="out, lse",
    residuals="out, lse, lse_low, out_low",
    constants="Tensor cu_seqlens_q, Tensor cu_seqlens_k",
    forward=varlen_forward,
    fake=varlen_results,
    backward=varlen_backward,
    backward_options="bool unrounded_gradients=False",
)
