"""Attention of a contiguous range of queries over the keys that they see. There is no communication here.

Packed sequences are passed as one sequence of their total length, with `starts` = (cu_seqlens_q,
cu_seqlens_k) over the tokens of all ranks. Without packing `starts` is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype, accumulator, in_16_byte_words
from monoidreduce._ops.registry import unrecorded
from monoidreduce.distributed.split import Split

__all__ = ["HEADS", "POSITIONS", "Fold", "attend", "fold_gradients", "fold_rows", "gradients", "part_of_bias"]

HEADS, POSITIONS = 1, 2  # axes
ALL = slice(None)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *starts: Tensor, options: Any) -> Any:
    """Call the attention op, without recording it for autograd.

    Sinks are not passed; `functional.finished` joins them afterwards.
    """
    if starts:
        return unrecorded("attention_varlen")[0](q, k, v, None, *starts, *options)
    return unrecorded("attention")[0](q, k, v, bias, None, *options)


def gradients(
    grads: Sequence[Tensor | None],
    inputs: Sequence[Any],
    results: Sequence[Tensor],
    options: Any,
    needed: Sequence[bool],
    unrounded: bool,
) -> list[Tensor]:
    """Gradients of `attend`, from the backward op.

    grads: of out and lse. inputs, options: arguments of attend. results: its results. needed: which inputs
    need a gradient. unrounded: return gradients in the accumulation dtype; see `UNROUNDED`.
    """
    q, k, v, bias, *starts = inputs
    if starts:
        packed = unrecorded("attention_varlen")[1]
        wanted = [*needed[:3], False]  # the last is for sinks
        return [*packed(*grads, q, k, v, None, *starts, *results, *options, wanted, unrounded)]
    backward = unrecorded("attention")[1]
    wanted = [*needed[:4], False]
    return [*backward(*grads, q, k, v, bias, None, *results, *options, wanted, True, unrounded)]


def part_of_bias(bias: Tensor | None, heads: slice = ALL, queries: slice = ALL, keys: slice = ALL) -> Any:
    """A view of a bias [B, H, M, N] for some heads, queries and keys.

    An axis of size 1 broadcasts and stays.
    """
    if bias is None:
        return None
    parts = zip(bias.shape, (ALL, heads, queries, keys), strict=True)
    return bias[tuple(part if size > 1 else ALL for size, part in parts)]


@dataclass(frozen=True)
class Fold:
    """A contiguous range of queries, and the range of keys that they see.

    own: the queries' range in this rank's shard. queries, keys: ranges in the whole sequence. For packed
    sequences keys is everything. options: options of the op, which aligns the last of these queries with the
    last of these keys; the window is shifted to suit.
    """

    own: slice
    queries: slice
    keys: slice
    options: tuple[Any, ...]

    @classmethod
    def of_rank(
        cls, queries: Split, keys: Split, options: tuple[Any, ...], packed: bool = False
    ) -> list[Fold]:
        """The folds of this rank: one, or two with the zigzag layout.

        options: options of the op for the whole sequence. packed: there are cu_seqlens.
        """
        found, at = [], 0
        for first, end in queries.spans(queries.group.rank):
            own, at = slice(at, at + end - first), at + end - first
            if packed:  # the op finds the visible keys itself, from cu_seqlens and the first query's index
                seen, here = slice(0, keys.length), (*options, first, queries.length)
            else:
                seen, here = _seen(first, end, keys.length - queries.length, keys.length, options)
            found.append(cls(own, slice(first, end), seen, here))
        return found

    def inputs(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *starts: Tensor
    ) -> tuple[Any, ...]:
        """Inputs of `attend`. q: this rank's shard. keys, values, bias: of the whole sequence."""
        of_bias = part_of_bias(bias, queries=self.queries, keys=self.keys)
        return q[:, :, self.own], keys[:, :, self.keys], values[:, :, self.keys], of_bias, *starts


def _seen(first: int, end: int, shift: int, keys: int, options: tuple[Any, ...]) -> tuple[slice, Any]:
    """The range of keys that queries first to end see, and the options of the op for this range.

    Query i is aligned with key i + shift.
    """
    scale, softcap, left, right, compensated = options
    stop = keys if right < 0 else min(max(end + shift + right, 0), keys)
    start = 0 if left < 0 else min(max(first + shift - left, 0), stop)
    # The op aligns the last query with the last key passed; `moved` is how far that is from the true key.
    moved = stop - (end + shift)
    window = left if left < 0 else left + moved, right if right < 0 else max(right - moved, 0)
    return slice(start, stop), (scale, softcap, *window, compensated)


def fold_rows(
    folds: Sequence[Fold], q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *starts: Tensor
) -> tuple[Tensor, ...]:
    """The results of the op for all queries of this rank."""
    found = (attend(*fold.inputs(q, keys, values, bias, *starts), options=fold.options) for fold in folds)
    return tuple(map(_in_order, zip(*found, strict=True)))


class KeyGradient:
    """The gradient of all keys, laid out by the ranks that own them: [ranks, B, H, longest, D].

    It is in the accumulation dtype. `longest` is the size of the longest shard; shorter ones are padded by 0.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.parts: Tensor | None = None

    def add(self, found: Tensor, at: slice) -> None:
        """Add the gradient `found` of the keys in the range `at`."""
        pieces = [*self.split.pieces(at)]
        if self.parts is not None:
            for rank, place, first, count in pieces:
                self.parts[rank].narrow(POSITIONS, place, count).add_(found.narrow(POSITIONS, first, count))
            return
        self.parts = self.split.room(found, POSITIONS, accumulation_dtype(found.dtype))
        to, of = in_16_byte_words(self.parts), in_16_byte_words(found)
        if found.dtype != self.parts.dtype or to.dtype != of.dtype:
            to, of = self.parts, found
        for rank, place, first, count in pieces:
            to[rank].narrow(POSITIONS, place, count).copy_(of.narrow(POSITIONS, first, count))
        for rest in (slice(0, at.start), slice(at.stop, self.split.length)):
            for rank, place, _, count in self.split.pieces(rest):
                to[rank].narrow(POSITIONS, place, count).zero_()


def fold_gradients(
    folds: Sequence[Fold],
    key_split: Split,
    grads: tuple[Tensor | None, Tensor | None],
    inputs: tuple[Any, ...],
    results: tuple[Tensor, ...],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and bias, those that are needed, for this rank's queries.

    The gradient of q is final. Those of k, v and bias are this rank's part of a sum over ranks, in the
    accumulation dtype; for k and v in the layout of KeyGradient.parts.

    grads: of out and lse. inputs, results: arguments and results of fold_rows.
    """
    q, _, _, bias, *_ = inputs
    dk, dv = KeyGradient(key_split), KeyGradient(key_split)
    dbias = accumulator(bias) if needed[3] else None
    of_queries: list[Tensor] = []
    # The last fold goes first, because with a causal mask it sees most keys: KeyGradient.add copies the first
    # gradient and only adds later ones.
    for fold in reversed(folds):
        upstream = [None if g is None else g[:, :, fold.own] for g in grads]
        of_own = [t[:, :, fold.own] for t in results]
        found = gradients(upstream, fold.inputs(*inputs), of_own, fold.options, needed, unrounded=True)
        of_queries.insert(0, found[0].to(q.dtype))
        for of_keys, gradient, wanted in ((dk, found[1], needed[1]), (dv, found[2], needed[2])):
            if wanted:
                of_keys.add(gradient, fold.keys)
        if dbias is not None:
            part_of_bias(dbias, queries=fold.queries, keys=fold.keys).add_(found[3])
    return _in_order(of_queries) if needed[0] else None, dk.parts, dv.parts, dbias


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), POSITIONS)
