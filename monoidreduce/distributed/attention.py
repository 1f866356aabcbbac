"""Attention with the sequence sharded over ranks (context parallelism).

"ulysses" exchanges heads for positions: each rank receives some heads of all positions, computes attention as
one device would, and sends the results back. "all_gather" gathers keys and values: each rank computes its own
queries over the keys that they see, and gradients of keys and values are summed over ranks. In both, one rank
sees all keys of a query, so no partial results are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce import functional
from monoidreduce._ops.attention_passes import in_full
from monoidreduce._ops.memory import accumulation_dtype, accumulator
from monoidreduce._torch_private import mark_untraced
from monoidreduce._validate import check_bool, mismatch
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
from monoidreduce.distributed.collectives import start_sum, sum_over_ranks
from monoidreduce.distributed.fold import replicated
from monoidreduce.distributed.group import UNTRACED, Group, Sharding, facts_of, key_of, together
from monoidreduce.distributed.messages import Arrival, Facts
from monoidreduce.distributed.once import differentiable_once
from monoidreduce.distributed.split import Split
from monoidreduce.ranks import RanksOrGroup

__all__ = ["Checked", "Whole", "attention_over_ranks", "over_ranks"]

OPTIONS = ("scale", "softcap", "left", "right", "compensated")  # of the op


@dataclass(frozen=True)
class Call:
    """A checked call on a group.

    queries, keys: how the positions are sharded. options: values of OPTIONS. sent: dtype in which partial
    gradients are communicated; None is the accumulation dtype. with_lse: return lse too. in_full: return the
    sum of both words of the op's 16-bit output, in the accumulation dtype, because `functional.finished`
    still rescales it (sinks, a bias that is constant along keys).
    """

    queries: Split
    keys: Split
    options: tuple[Any, ...]
    sent: torch.dtype | None
    with_lse: bool
    in_full: bool

    @property
    def group(self) -> Group:
        return self.queries.group


# Maps this rank's numbers of queries and keys to those of all ranks together.
Whole = Callable[[int, int], tuple[int, int]]


class Checked(NamedTuple):
    """Checked arguments of a call.

    tensors: q, k and v as the op takes them, bias or None, and for packed sequences cu_seqlens_q and
    cu_seqlens_k. options: values of OPTIONS. of_rows: a bias that is constant along keys, which
    `functional.finished` adds to the results. facts: what must agree between ranks.
    """

    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    of_rows: Tensor | None
    facts: Facts


def attention_over_ranks(
    ranks: RanksOrGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Any:
    """`functional.attention` with queries and keys sharded over ranks along the sequence."""

    def check(whole: Whole) -> Checked:
        check_bool("compensated", options["compensated"])
        tensors, of_op, of_rows = functional.check_attention(q, k, v, bias, sinks, **options, whole=whole)
        parts = dict(zip("qkv", tensors, strict=False))
        arguments = (*parts.items(), ("bias", bias), ("sinks", sinks))
        key = key_of(value for _, value in arguments)
        facts = Facts(key, partial(facts_of, arguments, dict.fromkeys(parts, POSITIONS)))
        return Checked(tensors, of_op, of_rows, facts)

    found = over_ranks("attention", ranks, check, sinks, return_lse)
    if found is None:
        return functional.attention(q, k, v, bias=bias, sinks=sinks, return_lse=return_lse, **options)
    return found if return_lse else found[0]


def over_ranks(
    operator: str,
    ranks: RanksOrGroup,
    check: Callable[[Whole], Checked],
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """out and lse of this rank's queries. None if the group has one rank: the caller then ignores the group.

    check: checks the other arguments.
    """
    sharding = Sharding.of(ranks)
    group, options = sharding.group, sharding.ranks

    def split(name: str, part: int) -> Split:
        return Split.of_part(group, name, part, options.length, options.layout)

    def whole(queries: int, keys: int) -> tuple[int, int]:
        return split("q", queries).length, split("k", keys).length

    def prepare() -> tuple[tuple[Call, bool, Checked], Facts]:
        sharding.check(operator, "method", "layout", "length", "grad_dtype")
        checked = check(whole)
        sharding.refuse_forward_mode(operator, (*checked.tensors, checked.of_rows, sinks))
        q, k, v, *_ = checked.tensors
        with_lse = check_bool("return_lse", return_lse) or checked.of_rows is not None or sinks is not None
        in_full = sinks is not None or checked.of_rows is not None
        splits = split("q", q.shape[POSITIONS]), split("k", k.shape[POSITIONS])
        call = Call(*splits, checked.options, options.grad_dtype, with_lse, in_full)
        by_heads = _by_heads(options.method, q.shape[HEADS], k.shape[HEADS], group.size)

        def facts() -> dict[str, Any]:
            names = ("method", "layout", "grad_dtype")
            found: dict[str, Any] = {f"ranks.{name}": str(getattr(options, name)) for name in names}
            differentiated = (torch.is_grad_enabled() and t.requires_grad for t in (q, k, v))
            found |= {f"{n}.requires_grad": wanted for n, wanted in zip("qkv", differentiated, strict=True)}
            found |= {"queries": call.queries.length, "keys": call.keys.length, "return_lse": with_lse}
            of_op = dict(zip(OPTIONS, checked.options, strict=True))
            seen = {"window (causal is one that ends at 0)": (of_op.pop("left"), of_op.pop("right"))}
            return checked.facts.tell() | found | of_op | seen

        # key_of(tensors) already contains the sizes of this rank's shards.
        of_ranks = (options.method, options.layout, options.length, options.grad_dtype)
        key = (checked.facts.key, *of_ranks, with_lse, key_of(checked.options))
        return (call, by_heads, checked), Facts((*key, group.size), facts, checked.facts.waiting)

    call, by_heads, checked = together(group, operator, prepare)
    if group.size == 1:
        return None
    q, k, v, bias, *starts = checked.tensors
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    method_of: Any = _Ulysses if by_heads else _AllGather
    out, lse = method_of.apply(call, q, k, v, bias, *starts)
    of_rows = checked.of_rows
    if of_rows is not None:
        of_rows = replicated(of_rows, group)
        if of_rows.dim() > 1 and of_rows.shape[-2] > 1:
            of_rows = call.queries.part(of_rows, of_rows.dim() - 2)
    sinks = None if sinks is None else replicated(sinks, group)
    return functional.finished(out, lse, q.dtype, of_rows, sinks)


mark_untraced(over_ranks, UNTRACED)


def _by_heads(method: str, heads: int, key_heads: int, ranks: int) -> bool:
    """Whether the call uses ulysses, which needs query heads (and key heads) that the ranks share evenly."""
    even = heads > 0 == heads % ranks and (key_heads % ranks == 0 or ranks % key_heads == 0)
    if method == "ulysses" and not even:
        expected = f"auto or all_gather where {ranks} ranks cannot share {heads} heads evenly"
        raise ValueError(mismatch("ranks.method", f"{expected}, of {key_heads} key heads", repr(method)))
    return even and method != "all_gather"


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *starts: Tensor
    ) -> Any:
        heads = q.shape[HEADS] // call.group.size
        ctx.own = slice(call.group.rank * heads, (call.group.rank + 1) * heads)
        ctx.call, ctx.key_heads = call, k.shape[HEADS]
        ctx.options = (*call.options, 0, call.queries.length) if starts else call.options
        # q is sent last: it is the largest, and k and v are joined while it is on its way.
        splits = call.keys, call.keys, call.queries
        k, v, q = _arrived(*(_start_to_heads(t, split) for t, split in zip((k, v, q), splits, strict=True)))
        inputs = (q, k, v, part_of_bias(bias, heads=ctx.own), *starts)
        with call.group.failing_together():
            out, lse, *low = attend(*inputs, options=ctx.options)
        ctx.save_for_backward(out, lse, *low, q, k, v, bias, *starts)
        ctx.set_materialize_grads(False)
        returned = [in_full(out, low[1]) if call.in_full else out, lse[..., None]][: 1 + call.with_lse]
        out, *lses = _arrived(*(_start_to_positions(t, call.queries) for t in returned))
        return out, lses[0][..., 0] if lses else None

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, lse_low, out_low, q, k, v, bias, *starts = ctx.saved_tensors
        results = (out, lse, lse_low, out_low)
        if grad_out is not None:
            grad_out = _start_to_heads(grad_out.to(q.dtype), call.queries)()
        if grad_lse is not None:
            grad_lse = _start_to_heads(grad_lse[..., None], call.queries)()[..., 0]
        inputs = (q, k, v, part_of_bias(bias, heads=ctx.own), *starts)
        partial = ctx.key_heads < call.group.size  # several ranks share a key head: dk, dv are partial sums
        with call.group.failing_together(any(needed[:4])):
            found = gradients((grad_out, grad_lse), inputs, results, ctx.options, needed, unrounded=partial)
        arrivals: list[Arrival | None] = [None] * 3
        for i in (1, 2):
            if needed[i]:
                part = found[i] if call.sent is None or not partial else found[i].to(call.sent)
                arrivals[i] = _start_to_positions(part, call.keys)
        if needed[0]:  # the largest comes last: it is packed while dk and dv are on their way
            arrivals[0] = _start_to_positions(found[0].to(q.dtype), call.queries)
        result = [None if arrival is None else arrival() for arrival in arrivals]
        if partial:
            result[1:] = [None if t is None else _summed_heads(t, ctx.key_heads, k.dtype) for t in result[1:]]
        dbias = None
        if needed[3]:
            total = accumulator(bias)
            part_of_bias(total, heads=ctx.own).copy_(found[3])
            dbias = sum_over_ranks(total, call.group, bias.dtype, sent=call.sent)
        return None, *result, dbias, *(None for _ in starts)


def _arrived(*arrivals: Arrival) -> list[Tensor]:
    return [arrival() for arrival in arrivals]


def _start_to_heads(part: Tensor, split: Split) -> Arrival:
    """All heads of this rank's positions -> this rank's heads of all positions.

    If there are fewer heads than ranks, neighbouring ranks get the same head.
    """
    ranks, part = split.group.size, split.padded(part, POSITIONS)
    if part.shape[HEADS] < ranks:
        part = part.repeat_interleave(ranks // part.shape[HEADS], HEADS)
    batch, heads, *others = part.shape
    of_ranks = part.view(batch, ranks, heads // ranks, *others).movedim(1, 0)
    arrival = split.group.start_exchange(of_ranks)
    return lambda: split.joined(arrival(), POSITIONS)


def _start_to_positions(whole: Tensor, split: Split) -> Arrival:
    """This rank's heads of all positions -> all ranks' heads of this rank's positions."""
    arrival = split.group.start_exchange(split.parts(whole, POSITIONS))
    return lambda: arrival().movedim(0, HEADS).flatten(HEADS, HEADS + 1).narrow(POSITIONS, 0, split.own)


def _summed_heads(t: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, ranks, ...] -> [B, heads, ...], summed over the neighbouring ranks that share a head."""
    batch, ranks, *others = t.shape
    shared = t.reshape(batch, heads, ranks // heads, *others)
    return shared.sum(2, dtype=accumulation_dtype(t.dtype)).to(dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *starts: Tensor
    ) -> Any:
        ctx.call = call
        ctx.folds = Fold.of_rank(call.queries, call.keys, call.options, packed=len(starts) > 0)
        keys, values = _arrived(*(call.keys.start_gather(t, POSITIONS) for t in (k, v)))
        out, lse, *low = fold_rows(ctx.folds, q, keys, values, bias, *starts)
        ctx.save_for_backward(out, lse, *low, q, k, v, bias, *starts)
        ctx.set_materialize_grads(False)
        return in_full(out, low[1]) if call.in_full else out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, lse_low, out_low, q, k, v, bias, *starts = ctx.saved_tensors
        results = (out, lse, lse_low, out_low)
        grad_out = None if grad_out is None else grad_out.to(q.dtype)
        keys, values = _arrived(*(call.keys.start_gather(t, POSITIONS) for t in (k, v)))
        inputs = (q, keys, values, bias, *starts)
        grads = grad_out, grad_lse
        with call.group.failing_together(any(needed[1:4])):
            dq, dk, dv, dbias = fold_gradients(ctx.folds, call.keys, grads, inputs, results, needed)
        arrivals = [None if t is None else _start_own_sum(t, call, k.dtype) for t in (dk, dv)]
        return (
            None,
            dq,
            *(None if arrival is None else arrival() for arrival in arrivals),
            None if dbias is None else sum_over_ranks(dbias, call.group, bias.dtype, sent=call.sent),
            *(None for _ in starts),
        )


def _start_own_sum(parts: Tensor, call: Call, dtype: torch.dtype) -> Arrival:
    """Gradients of this rank's keys, summed over ranks. parts: gradients of all keys, [ranks, ...]."""
    arrival = start_sum(parts, call.group, dtype, sent=call.sent, own=True)
    return lambda: arrival()[0].narrow(POSITIONS, 0, call.keys.own)
