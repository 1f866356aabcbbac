"""Attention of some queries of a sequence over the keys that they see. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulator
from monoidreduce.distributed.split import Split

__all__ = ["HEADS", "POSITIONS", "Fold", "attend", "fold_gradients", "fold_rows", "gradients", "part_of_bias"]

HEADS, POSITIONS = 1, 2  # axes
ALL = slice(None)


def attend(*args: Any) -> Any:
    """The op, with its arguments."""
    return torch.ops.monoidreduce.attention.default(*args)


def gradients(*args: Any, unrounded: bool) -> list[Tensor]:
    """Those of the backward op, whose keys are all that its queries see. unrounded: as `UNROUNDED` says."""
    return [*torch.ops.monoidreduce.attention_backward.default(*args, True, unrounded)]


def part_of_bias(bias: Tensor | None, heads: slice = ALL, queries: slice = ALL, keys: slice = ALL) -> Any:
    """A view of what some scores have of a bias [B, H, M, N]; an axis of size 1 is all they have."""
    if bias is None:
        return None
    parts = zip(bias.shape, (ALL, heads, queries, keys), strict=True)
    return bias[tuple(part if size > 1 else ALL for size, part in parts)]


@dataclass(frozen=True)
class Fold:
    """Queries that follow each other, and the keys that they see.

    own: the queries among those of their rank. queries, keys: among those of all ranks. options: of the op,
    which aligns the last of these queries with the last of these keys.
    """

    own: slice
    queries: slice
    keys: slice
    options: tuple[Any, ...]

    @classmethod
    def of_rank(cls, queries: Split, keys: Split, options: tuple[Any, ...]) -> list[Fold]:
        """The one or two folds of a rank. options: of the op, for the whole sequence."""
        found, at = [], 0
        scale, softcap, left, right, compensated = options
        shift = keys.length - queries.length
        for first, end in queries.spans(queries.group.rank):
            stop = keys.length if right < 0 else min(max(end + shift + right, 0), keys.length)
            start = 0 if left < 0 else min(max(first + shift - left, 0), stop)
            moved = stop - (end + shift)  # the key that the last query is aligned with
            window = left if left < 0 else left + moved, right if right < 0 else max(right - moved, 0)
            own, at = slice(at, at + end - first), at + end - first
            here = (scale, softcap, *window, compensated)
            found.append(cls(own, slice(first, end), slice(start, stop), here))
        return found

    def inputs(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        """q: of the rank. keys, values, bias: of the whole sequence."""
        of_bias = part_of_bias(bias, queries=self.queries, keys=self.keys)
        return q[:, :, self.own], keys[:, :, self.keys], values[:, :, self.keys], of_bias


def fold_rows(
    folds: Sequence[Fold], q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """What the op returns of a rank's queries."""
    found = (attend(*fold.inputs(q, keys, values, bias), *fold.options) for fold in folds)
    return tuple(map(_in_order, zip(*found, strict=True)))


def fold_gradients(
    folds: Sequence[Fold],
    grads: tuple[Tensor | None, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, ...],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of fold_rows that are needed.

    That of q is whole. The others are this rank's part of a sum, in the accumulation dtype. grads: of out and
    lse. results: what fold_rows returned.
    """
    q, *summed = inputs
    wanted = zip(summed, needed[1:], strict=True)
    dk, dv, dbias = (None if t is None or not want else accumulator(t) for t, want in wanted)
    of_queries = []
    for fold in folds:
        upstream = (None if g is None else g[:, :, fold.own] for g in grads)
        of_own = (t[:, :, fold.own] for t in results)
        found = gradients(*upstream, *fold.inputs(*inputs), *of_own, *fold.options, needed, unrounded=True)
        of_queries.append(found[0].to(q.dtype))
        if dk is not None:
            dk[:, :, fold.keys] += found[1]
        if dv is not None:
            dv[:, :, fold.keys] += found[2]
        if dbias is not None:
            part_of_bias(dbias, queries=fold.queries, keys=fold.keys).add_(found[3])
    return _in_order(of_queries) if needed[0] else None, dk, dv, dbias


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), POSITIONS)
