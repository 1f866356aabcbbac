"""Attention of some queries of a sequence over the keys that they see. Nothing is sent.

Packed sequences are given as one sequence that is as long as all of them. Then `starts` are cu_seqlens_q and
cu_seqlens_k of all ranks. Else there are no starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype, accumulator, in_words
from monoidreduce._ops.registry import unrecorded
from monoidreduce.distributed.split import Split

__all__ = ["HEADS", "POSITIONS", "Fold", "attend", "fold_gradients", "fold_rows", "gradients", "part_of_bias"]

HEADS, POSITIONS = 1, 2  # axes
ALL = slice(None)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *starts: Tensor, options: Any) -> Any:
    """What the op returns, with its options. Sinks are left to `functional.finished`."""
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
    """The gradients from the backward op of `attend`, whose keys are all that its queries see.

    inputs, options: of attend. results: what it returned. unrounded: as `UNROUNDED` says.
    """
    q, k, v, bias, *starts = inputs
    if starts:
        packed = unrecorded("attention_varlen")[1]
        wanted = [*needed[:3], False]  # of sinks
        return [*packed(*grads, q, k, v, None, *starts, *results, *options, wanted, unrounded)]
    backward = unrecorded("attention")[1]
    wanted = [*needed[:4], False]
    return [*backward(*grads, q, k, v, bias, None, *results, *options, wanted, True, unrounded)]


def part_of_bias(bias: Tensor | None, heads: slice = ALL, queries: slice = ALL, keys: slice = ALL) -> Any:
    """A view of what some scores have of a bias [B, H, M, N]; an axis of size 1 is all they have."""
    if bias is None:
        return None
    parts = zip(bias.shape, (ALL, heads, queries, keys), strict=True)
    return bias[tuple(part if size > 1 else ALL for size, part in parts)]


@dataclass(frozen=True)
class Fold:
    """Queries that follow each other, and the keys that they see.

    own: where the queries are in their rank's part. queries, keys: where they are in the whole sequence.
    options: of the op, which aligns the last of these queries with the last of these keys. Of packed
    sequences the keys are all.
    """

    own: slice
    queries: slice
    keys: slice
    options: tuple[Any, ...]

    @classmethod
    def of_rank(
        cls, queries: Split, keys: Split, options: tuple[Any, ...], packed: bool = False
    ) -> list[Fold]:
        """The one or two folds of a rank. options: of the op, for the whole sequence, or packed ones."""
        found, at = [], 0
        for first, end in queries.spans(queries.group.rank):
            own, at = slice(at, at + end - first), at + end - first
            if packed:  # which queries these are tells the op what they see
                seen, here = slice(0, keys.length), (*options, first, queries.length)
            else:
                seen, here = _seen(first, end, keys.length - queries.length, keys.length, options)
            found.append(cls(own, slice(first, end), seen, here))
        return found

    def inputs(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *starts: Tensor
    ) -> tuple[Any, ...]:
        """q: of the rank. keys, values, bias: of the whole sequence."""
        of_bias = part_of_bias(bias, queries=self.queries, keys=self.keys)
        return q[:, :, self.own], keys[:, :, self.keys], values[:, :, self.keys], of_bias, *starts


def _seen(first: int, end: int, shift: int, keys: int, options: tuple[Any, ...]) -> tuple[slice, Any]:
    """The keys that queries from first to end see, if query i is aligned with key i + shift; the options."""
    scale, softcap, left, right, compensated = options
    stop = keys if right < 0 else min(max(end + shift + right, 0), keys)
    start = 0 if left < 0 else min(max(first + shift - left, 0), stop)
    moved = stop - (end + shift)  # the key that the last query is aligned with
    window = left if left < 0 else left + moved, right if right < 0 else max(right - moved, 0)
    return slice(start, stop), (scale, softcap, *window, compensated)


def fold_rows(
    folds: Sequence[Fold], q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *starts: Tensor
) -> tuple[Tensor, ...]:
    """What the op returns of a rank's queries."""
    found = (attend(*fold.inputs(q, keys, values, bias, *starts), options=fold.options) for fold in folds)
    return tuple(map(_in_order, zip(*found, strict=True)))


class KeyGradient:
    """The gradient of all keys, in parts for their ranks: [ranks, B, H, longest, D].

    Of the accumulation dtype.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.parts: Tensor | None = None

    def add(self, found: Tensor, at: slice) -> None:
        """The gradient of these keys."""
        pieces = [*self.split.pieces(at)]
        if self.parts is not None:
            for rank, place, first, count in pieces:
                self.parts[rank].narrow(POSITIONS, place, count).add_(found.narrow(POSITIONS, first, count))
            return
        self.parts = self.split.room(found, POSITIONS, accumulation_dtype(found.dtype))
        to, of = in_words(self.parts), in_words(found)
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
    """The gradients of the inputs of fold_rows that are needed.

    The gradient of q is whole. The gradients of k, v and bias are this rank's part of a sum, in the
    accumulation dtype. KeyGradient says how the parts of k and v lie. grads: of out and lse. results: what
    fold_rows returned.
    """
    q, _, _, bias, *_ = inputs
    dk, dv = KeyGradient(key_split), KeyGradient(key_split)
    dbias = accumulator(bias) if needed[3] else None
    of_queries: list[Tensor] = []
    for fold in reversed(folds):  # where masking is causal the last one has most keys
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
