"""Sharding an axis of a tensor over ranks: which positions each rank has; cutting and joining shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import in_16_byte_words
from monoidreduce._validate import check_choice, check_int, check_tensor, mismatch
from monoidreduce.distributed.group import Group, facts_of, key_of, together
from monoidreduce.distributed.messages import Arrival, Call, Facts
from monoidreduce.ranks import LAYOUTS

__all__ = ["Split", "shard", "unshard"]


@dataclass(frozen=True)
class Split:
    """`length` positions over ranks, in chunks of `chunk`; the last chunks may be shorter or empty.

    Rank r has chunk r. With zigzag there are twice as many chunks, and rank r has chunk r and the r-th chunk
    from the end. With a causal mask all ranks then have equally many scores.
    """

    group: Group
    length: int
    chunk: int
    zigzag: bool

    @classmethod
    def of(cls, group: Group, length: int, layout: str) -> Split:
        """The split of `length` positions. Raises ValueError for an unknown layout."""
        check_choice("layout", layout, LAYOUTS)
        zigzag = layout == "zigzag" and group.size > 1
        return cls(group, length, -(-length // (group.size * (1 + zigzag))), zigzag)

    @classmethod
    def of_part(cls, group: Group, name: str, part: int, length: int | None, layout: str) -> Split:
        """The split in which this rank has `part` positions.

        length: number of all positions; None: every rank has equally many.

        Raises:
            ValueError: this rank should have another number; the message names the argument `name`.
        """
        if length is not None and check_int("length", length, "None or an int >= 0") < 0:
            raise ValueError(mismatch("length", "None or an int >= 0", length))
        split = cls.of(group, part * group.size if length is None else length, layout)
        if length is None:
            if split.zigzag and part % 2:
                raise ValueError(
                    mismatch(name, f"an even number of positions, or length, for {layout=}", part)
                )
        elif split.own != part:
            expected = f"{split.own} positions on rank {group.rank} of {group.size}, for {length=}, {layout=}"
            raise ValueError(mismatch(name, expected, part))
        return split

    @property
    def longest(self) -> int:
        """The largest number of positions of any rank."""
        return min(self.chunk * (1 + self.zigzag), self.length)

    @property
    def own(self) -> int:
        """The number of positions of this rank."""
        return sum(end - first for first, end in self.spans(self.group.rank))

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """A rank's positions as one or two ranges (first, end), in the order of its shard."""
        found: list[tuple[int, int]] = []
        for chunk in (rank, 2 * self.group.size - 1 - rank) if self.zigzag else (rank,):
            first, end = (min(i * self.chunk, self.length) for i in (chunk, chunk + 1))
            if found and found[0][1] == first:
                found[0] = found[0][0], end
            elif not found or first < end:
                found.append((first, end))
        return found

    def part(self, whole: Tensor, axis: int, rank: int | None = None) -> Tensor:
        """The shard of this rank, or of `rank`; a view if its positions are contiguous."""
        spans = self.spans(self.group.rank if rank is None else rank)
        found = [whole.narrow(axis, first, end - first) for first, end in spans]
        return found[0] if len(found) == 1 else torch.cat(found, axis)

    def padded(self, part: Tensor, axis: int) -> Tensor:
        """This rank's shard, padded by zeros to the length of the longest."""
        if not (missing := self.longest - part.shape[axis]):
            return part
        return torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1 - axis) + (0, missing))

    @property
    def even(self) -> bool:
        """Whether every shard is one chunk and all have the same length."""
        return not self.zigzag and self.length == self.group.size * self.chunk

    def pieces(self, at: slice) -> Iterator[tuple[int, int, int, int]]:
        """Where the positions in `at` are, in pieces: (rank, offset in its shard, offset in `at`, count)."""
        for rank in range(self.group.size):
            place = 0
            for first, end in self.spans(rank):
                begin, stop = max(first, at.start), min(end, at.stop)
                if begin < stop:
                    yield rank, place + begin - first, begin - at.start, stop - begin
                place += end - first

    def room(self, like: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor [ranks, ..., longest, ...] for the shards of `like` [..., length, ...].

        It is zeroed if any shard needs padding.
        """
        shape = (self.group.size, *like.shape[:axis], self.longest, *like.shape[axis + 1 :])
        padded = self.group.size * self.longest != self.length
        return like.new_zeros(shape, dtype=dtype) if padded else like.new_empty(shape, dtype=dtype)

    def parts(self, whole: Tensor, axis: int) -> Tensor:
        """[..., length, ...] -> [ranks, ..., longest, ...], padded shards; a view if they are even."""
        if self.even:
            shape = (*whole.shape[:axis], self.group.size, self.chunk, *whole.shape[axis + 1 :])
            return whole.view(shape).movedim(axis, 0)
        words = whole if axis == whole.dim() - 1 else in_16_byte_words(whole)
        found = self.room(words, axis)
        for rank, place, first, count in self.pieces(slice(0, self.length)):
            found[rank].narrow(axis, place, count).copy_(words.narrow(axis, first, count))
        return found.view(whole.dtype)

    def joined(self, parts: Tensor, axis: int) -> Tensor:
        """The inverse of `parts`: [ranks, ..., longest, ...] -> [..., length, ...]."""
        words = parts if axis == parts.dim() - 2 else in_16_byte_words(parts)
        if self.even:
            return words.movedim(0, axis).flatten(axis, axis + 1).view(parts.dtype)
        found = {}
        for rank, part in enumerate(words):
            at = 0
            for first, end in self.spans(rank):
                found[first, end] = part.narrow(axis, at, end - first)
                at += end - first
        return torch.cat([found[span] for span in sorted(found)], axis).view(parts.dtype)

    def gathered(self, part: Tensor, axis: int) -> Tensor:
        """All-gather this rank's shard -> [..., length, ...]."""
        return self.start_gather(part, axis)()

    def start_gather(self, part: Tensor, axis: int) -> Arrival:
        """Start `gathered` without blocking the stream."""
        arrival = self.group.start_gather(self.padded(part, axis))
        return lambda: self.joined(arrival(), axis)


def shard(tensor: Tensor, dim: int, group: Any, layout: str = "contiguous") -> Tensor:
    """This rank's shard of a tensor that all ranks have.

    In backward the gradient is all-gathered, so every rank gets the whole gradient of `tensor`.

    Args:
        tensor: of any shape, dtype and strides; the same on all ranks of the group.
        dim: the axis to shard, of any size.
        group: a ProcessGroup or a one-dimensional DeviceMesh.
        layout: "contiguous": shards follow each other in rank order, with the sizes of torch.chunk; the last
            ones may be shorter or empty. "zigzag": the axis is cut into twice as many chunks, and rank r has
            chunk r and the r-th chunk from the end. With a causal mask all ranks then have equal work.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    call_group, axis = Group.of(group), _axis(tensor, dim)
    split = Split.of(call_group, tensor.shape[axis], layout)
    call_group.call = Call.of("shard", _facts(tensor, axis, layout, {"size": tensor.shape[axis]}))
    result: Tensor = _Shard.apply(tensor, axis, split)  # type: ignore[no-untyped-call]
    return result


def unshard(
    tensor: Tensor, dim: int, group: Any, layout: str = "contiguous", length: int | None = None
) -> Tensor:
    """The whole tensor from the shards of all ranks, the inverse of `shard`.

    For the gradients to be right, every rank must compute the same from the result. Each rank then has the
    whole gradient, and takes its own shard of it without communication.

    Args:
        tensor: this rank's shard, of any dtype and strides; shards differ at most in their size along `dim`.
        dim: the axis along which the shards are joined.
        group: a ProcessGroup or a one-dimensional DeviceMesh.
        layout: the layout given to `shard`.
        length: the size of the whole axis. Needed if the shards differ in size.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    call_group = Group.of(group)

    def prepare() -> tuple[tuple[int, Split], Facts]:
        axis = _axis(tensor, dim)
        split = Split.of_part(call_group, "tensor", tensor.shape[axis], length, layout)
        own = {"tensor (its size along dim; give length= where parts differ)": tensor.shape[axis]}
        size = own if length is None else {"length": length}
        return (axis, split), _facts(tensor, axis, layout, size)

    axis, split = together(call_group, "unshard", prepare)
    result: Tensor = _Unshard.apply(tensor, axis, split)  # type: ignore[no-untyped-call]
    return result


def _facts(tensor: Tensor, axis: int, layout: str, size: dict[str, int]) -> Facts:
    facts = {"dim": axis, "layout": layout, **size}

    def tell() -> dict[str, Any]:
        return facts_of((("tensor", tensor),), {"tensor": axis}) | facts

    return Facts((key_of((tensor,)), *facts.items()), tell)


def _axis(tensor: Any, dim: int) -> int:
    axes: int = check_tensor("tensor", tensor).dim()
    if not -axes <= check_int("dim", dim) < axes:
        raise ValueError(mismatch("dim", f"one of the {axes} axes of tensor", dim))
    return dim % axes


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, split: Split) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return split.part(tensor, axis).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Unshard.apply(grad, ctx.axis, ctx.split), None, None  # type: ignore[no-untyped-call]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, split: Split) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return split.gathered(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Shard.apply(grad, ctx.axis, ctx.split), None, None  # type: ignore[no-untyped-call]
