"""Attention with its sequence split over ranks.

"ulysses" moves heads: each rank gets some heads of all positions, folds them as one device does, and sends
the results back. "all_gather" moves keys and values: each rank folds, for its own queries, the keys that they
see; gradients of keys and values are summed over ranks. Neither splits a row's keys, so nothing is merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce import functional
from monoidreduce._ops.attention import in_full
from monoidreduce._ops.memory import accumulation_dtype, accumulator
from monoidreduce._validate import check_bool, check_choice, mismatch
from monoidreduce.distributed.attention_folds import (
    HEADS,
    POSITIONS,
    Fold,
    attend,
    fold_gradients,
    fold_rows,
    gradients,
    part_of_bias,
)
from monoidreduce.distributed.collectives import exchange, sum_over_ranks
from monoidreduce.distributed.fold import replicated
from monoidreduce.distributed.group import Group, Sharding, facts_of, together
from monoidreduce.distributed.once import differentiable_once
from monoidreduce.distributed.split import Split

__all__ = ["attention_over_ranks"]

METHODS = ("auto", "ulysses", "all_gather")
OPTIONS = ("scale", "softcap", "left", "right", "compensated")  # of the op


@dataclass(frozen=True)
class Call:
    """sent: the dtype of partial gradients on their way; None is the accumulation dtype."""

    queries: Split
    keys: Split
    options: tuple[Any, ...]
    sent: torch.dtype | None
    with_lse: bool
    in_full: bool  # is the output returned in both words, in the accumulation dtype

    @property
    def group(self) -> Group:
        return self.queries.group


def attention_over_ranks(
    process_group: Any,
    method: str,
    layout: str,
    length: int | None,
    grad_dtype: torch.dtype | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """`functional.attention`, where each rank has a part of the queries and of the keys."""
    group = Group.of(process_group)

    def split(name: str, part: int) -> Split:
        return Split.of_part(group, name, part, length, layout)

    def whole(queries: int, keys: int) -> tuple[int, int]:
        return split("q", queries).length, split("k", keys).length

    def prepare() -> tuple[Any, dict[str, Any]]:
        tensors, of_op, of_rows = functional.check_attention(q, k, v, bias, sinks, **options, whole=whole)
        (_, heads, queries, _), (_, key_heads, keys, _), *_ = (t.shape for t in tensors[:2])
        with_lse = check_bool("return_lse", return_lse) or of_rows is not None or sinks is not None
        sent = Sharding.of(group, grad_dtype=grad_dtype).sent
        in_full = sinks is not None or of_rows is not None
        call = Call(split("q", queries), split("k", keys), of_op, sent, with_lse, in_full)
        by_heads = _by_heads(method, heads, key_heads, group.size)

        parts = {"q": tensors[0], "k": tensors[1], "v": tensors[2]}
        shapes = facts_of((*parts.items(), ("bias", bias), ("sinks", sinks)), dict.fromkeys(parts, POSITIONS))
        facts: dict[str, Any] = shapes | {"method": method, "layout": layout, "grad_dtype": str(sent)}
        facts |= {f"{name}.requires_grad": t.requires_grad for name, t in parts.items()}
        facts |= {"queries": call.queries.length, "keys": call.keys.length, "return_lse": with_lse}
        return (call, by_heads, tensors, of_rows), facts | dict(zip(OPTIONS, of_op, strict=True))

    call, by_heads, (*qkv, bias), of_rows = together(group, "attention", prepare)
    if group.size == 1:
        return functional.attention(q, k, v, bias=bias, sinks=sinks, return_lse=return_lse, **options)
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    over_ranks: Any = _Ulysses if by_heads else _AllGather
    out, lse = over_ranks.apply(call, *qkv, bias)
    if of_rows is not None:
        of_rows = replicated(of_rows, group)
        if of_rows.dim() > 1 and of_rows.shape[-2] > 1:
            of_rows = call.queries.part(of_rows, of_rows.dim() - 2)
    sinks = None if sinks is None else replicated(sinks, group)
    out, lse = functional.finished(out, lse, qkv[0].dtype, of_rows, sinks)
    return (out, lse) if return_lse else out


def _by_heads(method: str, heads: int, key_heads: int, ranks: int) -> bool:
    """Does a call take ulysses: ranks then have as many query heads, of as many key heads."""
    check_choice("method", method, METHODS)
    even = heads > 0 == heads % ranks and (key_heads % ranks == 0 or ranks % key_heads == 0)
    if method == "ulysses" and not even:
        expected = f"auto or all_gather where {ranks} ranks cannot share {heads} heads evenly"
        raise ValueError(mismatch("method", f"{expected}, of {key_heads} key heads", repr(method)))
    return even and method != "all_gather"


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        heads = q.shape[HEADS] // call.group.size
        ctx.own = slice(call.group.rank * heads, (call.group.rank + 1) * heads)
        ctx.call, ctx.key_heads = call, k.shape[HEADS]
        q, k, v = _to_heads(q, call.queries), _to_heads(k, call.keys), _to_heads(v, call.keys)
        out, lse, *low = attend(q, k, v, part_of_bias(bias, heads=ctx.own), *call.options)
        ctx.save_for_backward(q, k, v, bias, out, lse, *low)
        ctx.set_materialize_grads(False)
        of_own = _to_positions(lse[..., None], call.queries)[..., 0] if call.with_lse else None
        return _to_positions(in_full(out, low[1]) if call.in_full else out, call.queries), of_own

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        if grad_out is not None:
            grad_out = _to_heads(grad_out.to(ctx.saved_tensors[0].dtype), call.queries)
        if grad_lse is not None:
            grad_lse = _to_heads(grad_lse[..., None], call.queries)[..., 0]
        q, k, v, bias, *results = ctx.saved_tensors
        inputs = (q, k, v, part_of_bias(bias, heads=ctx.own))
        partial = ctx.key_heads < call.group.size  # ranks share a key head
        found = gradients(grad_out, grad_lse, *inputs, *results, *call.options, needed, unrounded=partial)
        result: list[Tensor | None] = [None] * 4
        if needed[0]:
            result[0] = _to_positions(found[0].to(q.dtype), call.queries)
        for i in (1, 2):
            if needed[i]:
                part = found[i] if call.sent is None or not partial else found[i].to(call.sent)
                of_ranks = _to_positions(part, call.keys)
                result[i] = _summed_heads(of_ranks, ctx.key_heads, k.dtype) if partial else of_ranks
        if needed[3]:
            total = accumulator(bias)
            part_of_bias(total, heads=ctx.own).copy_(found[3])
            result[3] = sum_over_ranks(total, call.group, bias.dtype, sent=call.sent)
        return None, *result


def _to_heads(part: Tensor, split: Split) -> Tensor:
    """All heads of this rank's positions -> this rank's heads of all positions.

    Of fewer heads than ranks neighbours get the same one.
    """
    ranks, part = split.group.size, split.padded(part, POSITIONS)
    if part.shape[HEADS] < ranks:
        part = part.repeat_interleave(ranks // part.shape[HEADS], HEADS)
    batch, heads, *others = part.shape
    of_ranks = part.view(batch, ranks, heads // ranks, *others).movedim(1, 0)
    return split.joined(exchange(of_ranks, split.group), POSITIONS)


def _to_positions(whole: Tensor, split: Split) -> Tensor:
    """This rank's heads of all positions -> all ranks' heads of this rank's positions."""
    of_ranks = exchange(split.parts(whole, POSITIONS), split.group)
    return of_ranks.movedim(0, HEADS).flatten(HEADS, HEADS + 1).narrow(POSITIONS, 0, split.own)


def _summed_heads(t: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, ranks, ...] -> [B, heads, ...], the sums of what neighbours have of one head."""
    batch, ranks, *others = t.shape
    shared = t.reshape(batch, heads, ranks // heads, *others)
    return shared.sum(2, dtype=accumulation_dtype(t.dtype)).to(dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        ctx.call, ctx.folds = call, Fold.of_rank(call.queries, call.keys, call.options)
        keys, values = call.keys.gathered(k, POSITIONS), call.keys.gathered(v, POSITIONS)
        out, lse, *low = fold_rows(ctx.folds, q, keys, values, bias)
        ctx.save_for_backward(q, k, v, bias, out, lse, *low)
        ctx.set_materialize_grads(False)
        return in_full(out, low[1]) if call.in_full else out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        q, k, v, bias, *results = ctx.saved_tensors
        grad_out = None if grad_out is None else grad_out.to(q.dtype)
        inputs = (q, call.keys.gathered(k, POSITIONS), call.keys.gathered(v, POSITIONS), bias)
        dq, dk, dv, dbias = fold_gradients(ctx.folds, (grad_out, grad_lse), inputs, tuple(results), needed)
        return (
            None,
            dq,
            None if dk is None else _own_sum(dk, call, k.dtype),
            None if dv is None else _own_sum(dv, call, v.dtype),
            None if dbias is None else sum_over_ranks(dbias, call.group, bias.dtype, sent=call.sent),
        )


def _own_sum(total: Tensor, call: Call, dtype: torch.dtype) -> Tensor:
    """Of gradients of all keys, summed over ranks, those of this rank's keys."""
    parts = call.keys.parts(total, POSITIONS)
    own: Tensor
    (own,) = sum_over_ranks(parts, call.group, dtype, sent=call.sent, own=True)
    return own.narrow(POSITIONS, 0, call.keys.own)
