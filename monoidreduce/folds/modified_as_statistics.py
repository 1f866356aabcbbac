"""Attention with functions of scores, and `attend`, as a call of the op `statistics`.

A program of attention's scores becomes one of statistics: the payload's mean by a softmax, or its total. Its
gradients have gradients.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.attention_mask import band
from monoidreduce._ops.attention_passes import score_scale
from monoidreduce._ops.registry import call_op
from monoidreduce.folds.modified_attention_op import Inputs, Options
from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.operations import LEAVES
from monoidreduce.folds.program.program import Program, parse
from monoidreduce.functional import _with_sinks

__all__ = ["modified_attention", "seen_in_sequences"]

# The integers of a row: batch, head and query, then the first key that it sees, and the last one + 1.
_INTEGERS = {"batch": 0, "head": 1, "query": 2}
_FIRST, _STOP = 3, 4


@lru_cache(256)
def _of_statistics(text: str, weights: bool, bounded: bool) -> tuple[str, tuple[int, ...]]:
    """The program of statistics, and which of a row's integers it has.

    weights: of `attend`. bounded: rows see only some keys.
    """
    of, graph = parse(text), Graph()
    placed: list[Expression] = []
    for name, *rest in of.nodes:
        if name in _INTEGERS:
            placed.append(graph.leaf("row_index", _INTEGERS[name], "number"))
        elif name in LEAVES:
            placed.append(graph.leaf(name, *rest))
        else:
            placed.append(graph.raw(name, *(placed[i] for i in rest)))
    score, *factors = (placed[number] for number in of.totals)
    kept = [placed[number] for number in of.counts]
    if bounded:
        position = graph.leaf("position")
        first, stop = (graph.leaf("row_index", k, "int64") for k in (_FIRST, _STOP))
        kept += [position >= first, position < stop]
    for each in kept:
        score = score.where(each, score, 0.0 if weights else -math.inf)
    factor = factors[0] if factors else graph.constant(1.0)
    nodes = tuple(graph.nodes)
    if weights:
        program, of_rows = Program(nodes, payloads=((-1, score.number),)).pruned()
    else:
        softmaxes, payloads = ((score.number,),), ((0, factor.number),)
        program, of_rows = Program(nodes, softmaxes=softmaxes, payloads=payloads).pruned()
    return program.text, tuple(of_rows["row_index"])


def modified_attention(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """out and lse of the op `modified_attention`, whose arguments these are."""
    of, options = Inputs(*arguments[:9]), Options(*arguments[9:])
    q, k, v = of.q, of.k, of.v
    (B, H, M, _), N, (left, right) = q.shape, k.shape[2], (options.left, options.right)
    bounds = band(left, right).bounds(M, N, q.device)
    if of.cu_seqlens_q is not None and of.cu_seqlens_k is not None:
        bounds = seen_in_sequences(q, of.cu_seqlens_q, of.cu_seqlens_k, left, right)
    text, integers = _of_statistics(options.program, options.weights, bounds is not None)
    head = torch.arange(B * H, device=q.device).repeat_interleave(M)
    of_rows = [head // max(H, 1), head % max(H, 1), torch.arange(M, device=q.device).repeat(B * H)]
    if bounds is not None:
        of_rows += bounds.repeat(1, B * H).unbind(0)
    row_index = torch.stack([of_rows[n] for n in integers]) if integers else None
    k, v = (t.repeat_interleave(H // max(t.shape[1], 1), 1) for t in (k, v))
    operands = q.flatten(0, 2), k.flatten(0, 2), None, None
    inputs = *operands, None, None, v.flatten(0, 2), of.table, row_index, None, of.table_index
    of_fold = text, [v.shape[3]], B * H, options.sizes or [], score_scale(q, options.scale), None
    values, sums, *_ = call_op("statistics", *inputs, *of_fold)
    out = sums.view(B, H, M, -1)
    if options.weights:
        return out.to(q.dtype), None
    lse = values[0].view(B, H, M)
    if of.sinks is not None:
        out, lse = _with_sinks(out, lse, of.sinks)
    return out.to(q.dtype), lse


def seen_in_sequences(
    q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, left: int, right: int, first: int = 0
) -> Tensor:
    """`Mask.bounds` of packed sequences, by ops that torch.func can follow. first: q's first token."""
    # The end stands there twice, so that queries behind the last sequence belong to a sequence without keys.
    of_q, of_k = (torch.cat((t, t[-1:])).to(q.device, torch.int64) for t in (cu_seqlens_q, cu_seqlens_k))
    query = torch.arange(first, first + q.shape[2], device=q.device)
    number = torch.searchsorted(of_q[1:-1], query, right=True)  # of the query's sequence
    start, stop = of_k[number], of_k[number + 1]
    aligned = query - of_q[number + 1] + stop
    if left >= 0:
        start = torch.maximum(start, aligned - left)
    if right >= 0:
        stop = torch.minimum(stop, aligned + right + 1)
    return torch.stack((start, stop))
