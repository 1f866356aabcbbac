"""Attention with its sequence split over ranks.

"ulysses" moves heads: each rank gets some heads of all positions, folds them as one device does, and sends
the results back. "all_gather" moves keys and values: each rank folds, for its own queries, the keys that they
see; gradients of keys and values are summed over ranks. Neither splits a row's keys, so nothing is merged.

Both go through the heads in parts: while one is folded, the next one arrives, and the last one is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    joined,
    part_of_bias,
)
from monoidreduce.distributed.collectives import start_exchange, start_sum, sum_over_ranks
from monoidreduce.distributed.fold import replicated
from monoidreduce.distributed.group import Arrival, Group, Sharding, facts_of, together
from monoidreduce.distributed.once import differentiable_once
from monoidreduce.distributed.split import Split

__all__ = ["Checked", "Whole", "attention_over_ranks", "over_ranks"]

METHODS = ("auto", "ulysses", "all_gather")
OPTIONS = ("scale", "softcap", "left", "right", "compensated")  # of the op
MOST_PARTS = 4
LEAST_BYTES = 8 << 20  # of the queries of a part


@dataclass(frozen=True)
class Call:
    """options: see OPTIONS. sent: the dtype of partial gradients on their way; None is that of sums."""

    queries: Split
    keys: Split
    options: tuple[Any, ...]
    sent: torch.dtype | None
    with_lse: bool
    in_full: bool  # is the output returned in both words, in the accumulation dtype

    @property
    def group(self) -> Group:
        return self.queries.group


Whole = Callable[[int, int], tuple[int, int]]  # the queries and keys of all ranks, where one has so many


class Checked(NamedTuple):
    """Arguments of a call.

    tensors: q, k and v as the op takes them, bias or None and, of packed sequences, cu_seqlens_q and
    cu_seqlens_k. options: as OPTIONS. of_rows: a bias by rows, left to `finished`. facts: of the tensors, for
    `together`.
    """

    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    of_rows: Tensor | None
    facts: dict[str, Any]


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

    def check(whole: Whole) -> Checked:
        tensors, of_op, of_rows = functional.check_attention(q, k, v, bias, sinks, **options, whole=whole)
        parts = dict(zip("qkv", tensors, strict=False))
        arguments = (*parts.items(), ("bias", bias), ("sinks", sinks))
        return Checked(tensors, of_op, of_rows, facts_of(arguments, dict.fromkeys(parts, POSITIONS)))

    ranks = (process_group, method, layout, length, grad_dtype)
    found = over_ranks("attention", ranks, check, sinks, return_lse)
    if found is None:
        return functional.attention(q, k, v, bias=bias, sinks=sinks, return_lse=return_lse, **options)
    return found if return_lse else found[0]


def over_ranks(
    operator: str,
    ranks: tuple[Any, str, str, int | None, torch.dtype | None],
    check: Callable[[Whole], Checked],
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor] | None:
    """out and lse of this rank's queries; None in a group of one rank, whose call is that of no group.

    ranks: process_group, method, layout, length and grad_dtype. check: checks the other arguments.
    """
    process_group, method, layout, length, grad_dtype = ranks
    group = Group.of(process_group)

    def split(name: str, part: int) -> Split:
        return Split.of_part(group, name, part, length, layout)

    def whole(queries: int, keys: int) -> tuple[int, int]:
        return split("q", queries).length, split("k", keys).length

    def prepare() -> tuple[tuple[Call, bool, Checked], dict[str, Any]]:
        checked = check(whole)
        q, k, v, *_ = checked.tensors
        with_lse = check_bool("return_lse", return_lse) or checked.of_rows is not None or sinks is not None
        sent = Sharding.of(group, grad_dtype=grad_dtype).sent
        in_full = sinks is not None or checked.of_rows is not None
        splits = split("q", q.shape[POSITIONS]), split("k", k.shape[POSITIONS])
        call = Call(*splits, checked.options, sent, with_lse, in_full)
        by_heads = _by_heads(method, q.shape[HEADS], k.shape[HEADS], group.size)
        facts: dict[str, Any] = {"method": method, "layout": layout, "grad_dtype": str(sent)}
        facts |= {f"{n}.requires_grad": t.requires_grad for n, t in zip("qkv", (q, k, v), strict=True)}
        facts |= {"queries": call.queries.length, "keys": call.keys.length, "return_lse": with_lse}
        facts |= dict(zip(OPTIONS, checked.options, strict=True))
        return (call, by_heads, checked), checked.facts | facts

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


def _by_heads(method: str, heads: int, key_heads: int, ranks: int) -> bool:
    """Does a call take ulysses: ranks then have as many query heads, of as many key heads."""
    check_choice("method", method, METHODS)
    even = heads > 0 == heads % ranks and (key_heads % ranks == 0 or ranks % key_heads == 0)
    if method == "ulysses" and not even:
        expected = f"auto or all_gather where {ranks} ranks cannot share {heads} heads evenly"
        raise ValueError(mismatch("method", f"{expected}, of {key_heads} key heads", repr(method)))
    return even and method != "all_gather"


class Part(NamedTuple):
    """Neighbouring heads that are folded together: of queries, and of keys."""

    heads: slice
    keys: slice

    def of_rank(self, group: Group) -> slice:
        """The heads that ulysses gives this rank."""
        own = (self.heads.stop - self.heads.start) // group.size
        first = self.heads.start + group.rank * own
        return slice(first, first + own)


def _parts(call: Call, q: Tensor, k: Tensor, ranks: int) -> list[Part]:
    """The same ones on all ranks, also on one with fewer queries. ranks: how many share a part's heads."""
    batch, heads, _, width = q.shape
    key_heads = k.shape[HEADS]
    size = batch * heads * call.queries.longest * width * q.element_size()
    most = min(MOST_PARTS, max(size // LEAST_BYTES, 1), max(key_heads // ranks, 1))
    count = next(n for n in range(most, 0, -1) if n == 1 or key_heads % (n * ranks) == 0)

    def parts(all_heads: int) -> list[slice]:
        step = all_heads // count
        return [slice(i * step, (i + 1) * step) for i in range(count)]

    return [Part(*both) for both in zip(parts(heads), parts(key_heads), strict=True)]


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *starts: Tensor
    ) -> Any:
        ctx.call, ctx.key_heads = call, k.shape[HEADS]
        ctx.options = (*call.options, 0, call.queries.length) if starts else call.options
        ctx.parts = parts = _parts(call, q, k, call.group.size)
        arrivals = [
            (
                _start_to_heads(q[:, part.heads], call.queries),
                _start_to_heads(k[:, part.keys], call.keys),
                _start_to_heads(v[:, part.keys], call.keys),
            )
            for part in parts
        ]
        outs, lses, saved = _Returned(call.queries, len(parts)), _Returned(call.queries, len(parts)), []
        for part, arrival in zip(parts, arrivals, strict=True):
            q, k, v = (arrived() for arrived in arrival)
            own_bias = part_of_bias(bias, heads=part.of_rank(call.group))
            out, lse, *low = attend(q, k, v, own_bias, *starts, options=ctx.options)
            saved += [out, lse, *low, q, k, v]
            outs.send(in_full(out, low[1]) if call.in_full else out)
            if call.with_lse:
                lses.send(lse[..., None])
        ctx.save_for_backward(bias, *starts, *saved)
        ctx.set_materialize_grads(False)
        return outs.arrived(), lses.arrived()[..., 0] if call.with_lse else None

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed, parts = ctx.call, ctx.needs_input_grad[1:], ctx.parts
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        bias, *starts = ctx.saved_tensors[: len(needed) - 3]
        saved = ctx.saved_tensors[len(needed) - 3 :]
        dtype = saved[4].dtype  # of q
        grads = (
            None if grad_out is None else grad_out.to(dtype),
            None if grad_lse is None else grad_lse[..., None],
        )
        arrivals = [
            [None if g is None else _start_to_heads(g[:, part.heads], call.queries) for g in grads]
            for part in parts
        ]
        partial = ctx.key_heads < call.group.size  # ranks share a key head
        splits = call.queries, call.keys, call.keys
        returned = [_Returned(split, len(parts)) for split in splits]
        total = accumulator(bias) if needed[3] else None
        for i, part in enumerate(parts):
            out, lse, lse_low, out_low, q, k, v = saved[7 * i : 7 * i + 7]
            of_out, of_lse = (None if arrived is None else arrived() for arrived in arrivals[i])
            of_lse = None if of_lse is None else of_lse[..., 0]
            own = part.of_rank(call.group)
            inputs, results = (q, k, v, part_of_bias(bias, heads=own), *starts), (out, lse, lse_low, out_low)
            found = gradients((of_out, of_lse), inputs, results, ctx.options, needed, unrounded=partial)
            if needed[0]:
                returned[0].send(found[0].to(dtype))
            for j in (1, 2):
                if needed[j]:
                    sent = found[j].dtype if call.sent is None or not partial else call.sent
                    returned[j].send(found[j].to(sent))
            if total is not None:
                part_of_bias(total, heads=own).copy_(found[3])
        result = [back.arrived() if wanted else None for back, wanted in zip(returned, needed, strict=False)]
        if partial:
            result[1:] = [None if t is None else _summed_heads(t, ctx.key_heads, dtype) for t in result[1:]]
        if total is not None:
            result.append(sum_over_ranks(total, call.group, bias.dtype, sent=call.sent))
        return None, *result, *(None for _ in range(len(needed) - len(result)))


def _start_to_heads(part: Tensor, split: Split) -> Arrival:
    """All heads of this rank's positions -> this rank's heads of all positions.

    Of fewer heads than ranks neighbours get the same one.
    """
    ranks, part = split.group.size, split.padded(part, POSITIONS)
    if part.shape[HEADS] < ranks:
        part = part.repeat_interleave(ranks // part.shape[HEADS], HEADS)
    batch, heads, *others = part.shape
    of_ranks = part.view(batch, ranks, heads // ranks, *others).movedim(1, 0)
    arrival = start_exchange(of_ranks, split.group)
    return lambda: split.joined(arrival(), POSITIONS)


class _Returned:
    """Collects heads, part by part: this rank's ones of all positions -> all of this rank's positions."""

    def __init__(self, split: Split, parts: int) -> None:
        self.split, self.parts = split, parts
        self.arrivals: list[Arrival] = []
        self.found: Tensor | None = None  # [parts, ranks, B, heads, positions, ...]

    def send(self, whole: Tensor) -> None:
        """whole: [B, heads, positions, ...], of the next part."""
        of_ranks = self.split.parts(whole, POSITIONS)
        if self.found is None:
            self.found = of_ranks.new_empty((self.parts, *of_ranks.shape))
        self.arrivals.append(start_exchange(of_ranks, self.split.group, self.found[len(self.arrivals)]))

    def arrived(self) -> Tensor:
        assert self.found is not None
        for arrival in self.arrivals:
            arrival()
        heads = self.found.movedim(2, 0).flatten(HEADS, HEADS + 2)
        return heads.narrow(POSITIONS, 0, self.split.own)


def _summed_heads(t: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, ranks, ...] -> [B, heads, ...], the sums of what neighbours have of one head."""
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
        ctx.parts = _parts(call, q, k, 1)
        found = []
        for part, keys, values in _gathered(ctx.parts, call, k, v):
            own_bias = part_of_bias(bias, heads=part.heads)
            found.append(fold_rows(ctx.folds, q[:, part.heads], keys, values, own_bias, *starts))
        out, lse, *low = (joined(results, HEADS) for results in zip(*found, strict=True))
        ctx.save_for_backward(out, lse, *low, q, k, v, bias, *starts)
        ctx.set_materialize_grads(False)
        return in_full(out, low[1]) if call.in_full else out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        *results, q, k, v, bias = ctx.saved_tensors[:8]
        starts = ctx.saved_tensors[8:]
        grads = None if grad_out is None else grad_out.to(q.dtype), grad_lse
        total = accumulator(bias) if needed[3] else None
        of_queries: list[Tensor] = []
        of_keys: list[list[Arrival]] = [[], []]  # and of values
        for part, keys, values in _gathered(ctx.parts, call, k, v):
            upstream = [None if g is None else g[:, part.heads] for g in grads]
            of_part = [t[:, part.heads] for t in results]
            inputs = (q[:, part.heads], keys, values, part_of_bias(bias, heads=part.heads), *starts)
            dq, *summed, dbias = fold_gradients(ctx.folds, upstream, inputs, of_part, needed)
            if dq is not None:
                of_queries.append(dq)
            for sums, dk in zip(of_keys, summed, strict=True):
                if dk is not None:
                    sums.append(_start_own_sum(dk, call, k.dtype))
            if total is not None:
                part_of_bias(total, heads=part.heads).add_(dbias)
        return (
            None,
            joined(of_queries, HEADS) if of_queries else None,
            *(joined([arrived() for arrived in sums], HEADS) if sums else None for sums in of_keys),
            None if total is None else sum_over_ranks(total, call.group, bias.dtype, sent=call.sent),
            *(None for _ in starts),
        )


def _gathered(parts: list[Part], call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """Each part, with its keys and values of all ranks as soon as they are there."""
    arrivals = [[call.keys.start_gather(t[:, part.keys], POSITIONS) for t in (k, v)] for part in parts]
    for part, (keys, values) in zip(parts, arrivals, strict=True):
        yield part, keys(), values()


def _start_own_sum(total: Tensor, call: Call, dtype: torch.dtype) -> Arrival:
    """Of gradients of all keys, summed over ranks, those of this rank's keys."""
    arrival = start_sum(call.keys.parts(total, POSITIONS), call.group, dtype, sent=call.sent, own=True)
    return lambda: arrival()[0].narrow(POSITIONS, 0, call.keys.own)
