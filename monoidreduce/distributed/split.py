"""Parts of tensors: which positions of an axis each rank has, and parts joined and taken again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import in_words
from monoidreduce._validate import check_choice, check_int, check_tensor, mismatch
from monoidreduce.distributed.group import Group, facts_of, key_of, together
from monoidreduce.distributed.messages import Arrival, Call, Facts

__all__ = ["LAYOUTS", "Split", "shard", "unshard"]

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Split:
    """`length` positions over ranks, in chunks of `chunk`; the last ones may be shorter or empty.

    Rank r has chunk r. zigzag: of twice as many chunks it has chunk r and the r-th from the end. So all ranks
    have as many scores under causal masking.
    """

    group: Group
    length: int
    chunk: int
    zigzag: bool

    @classmethod
    def of(cls, group: Group, length: int, layout: str) -> Split:
        """Raises ValueError unless there is such a layout."""
        check_choice("layout", layout, LAYOUTS)
        zigzag = layout == "zigzag" and group.size > 1
        return cls(group, length, -(-length // (group.size * (1 + zigzag))), zigzag)

    @classmethod
    def of_part(cls, group: Group, name: str, part: int, length: int | None, layout: str) -> Split:
        """Where this rank has so many positions. length: None if each rank has as many."""
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
        """The most positions that a rank has."""
        return min(self.chunk * (1 + self.zigzag), self.length)

    @property
    def own(self) -> int:
        """How many positions this rank has."""
        return sum(end - first for first, end in self.spans(self.group.rank))

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """A rank's positions, as one or two ranges (first, end) in its order."""
        found: list[tuple[int, int]] = []
        for chunk in (rank, 2 * self.group.size - 1 - rank) if self.zigzag else (rank,):
            first, end = (min(i * self.chunk, self.length) for i in (chunk, chunk + 1))
            if found and found[0][1] == first:
                found[0] = found[0][0], end
            elif not found or first < end:
                found.append((first, end))
        return found

    def part(self, whole: Tensor, axis: int, rank: int | None = None) -> Tensor:
        """This rank's positions, or another's: a view where they follow each other."""
        spans = self.spans(self.group.rank if rank is None else rank)
        found = [whole.narrow(axis, first, end - first) for first, end in spans]
        return found[0] if len(found) == 1 else torch.cat(found, axis)

    def padded(self, part: Tensor, axis: int) -> Tensor:
        """A rank's part, with zeros behind it where the longest one is longer."""
        if not (missing := self.longest - part.shape[axis]):
            return part
        return torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1 - axis) + (0, missing))

    @property
    def even(self) -> bool:
        """Is a part one chunk, as long as any other."""
        return not self.zigzag and self.length == self.group.size * self.chunk

    def pieces(self, at: slice) -> Iterator[tuple[int, int, int, int]]:
        """Where these positions are: a rank, from where in its part, from where in `at`, and how many."""
        for rank in range(self.group.size):
            place = 0
            for first, end in self.spans(rank):
                begin, stop = max(first, at.start), min(end, at.stop)
                if begin < stop:
                    yield rank, place + begin - first, begin - at.start, stop - begin
                place += end - first

    def room(self, like: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        """[ranks, ..., longest, ...] for parts of a tensor [..., length, ...]; 0 where a part is padded."""
        shape = (self.group.size, *like.shape[:axis], self.longest, *like.shape[axis + 1 :])
        padded = self.group.size * self.longest != self.length
        return like.new_zeros(shape, dtype=dtype) if padded else like.new_empty(shape, dtype=dtype)

    def parts(self, whole: Tensor, axis: int) -> Tensor:
        """[..., length, ...] -> [ranks, ..., longest, ...], each part padded; a view where parts are even."""
        if self.even:
            shape = (*whole.shape[:axis], self.group.size, self.chunk, *whole.shape[axis + 1 :])
            return whole.view(shape).movedim(axis, 0)
        words = whole if axis == whole.dim() - 1 else in_words(whole)
        found = self.room(words, axis)
        for rank, place, first, count in self.pieces(slice(0, self.length)):
            found[rank].narrow(axis, place, count).copy_(words.narrow(axis, first, count))
        return found.view(whole.dtype)

    def joined(self, parts: Tensor, axis: int) -> Tensor:
        """[ranks, ..., longest, ...] -> [..., length, ...]."""
        words = parts if axis == parts.dim() - 2 else in_words(parts)
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
        """This rank's part -> [..., length, ...]."""
        return self.start_gather(part, axis)()

    def start_gather(self, part: Tensor, axis: int) -> Arrival:
        """gathered, while the stream goes on."""
        arrival = self.group.start_gather(self.padded(part, axis))
        return lambda: self.joined(arrival(), axis)


def shard(tensor: Tensor, dim: int, process_group: Any, layout: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that all ranks have.

    Its gradient is gathered, so that all ranks have the whole one.

    Args:
        tensor: of any shape, dtype and strides; the same on all ranks of the group.
        dim: the axis to be split, of any size.
        process_group: a ProcessGroup or a one-dimensional DeviceMesh.
        layout: "contiguous": parts follow each other in rank order. Their sizes are as torch.chunk makes
            them: the last ones may be shorter or empty. "zigzag": the axis is cut so into twice as many
            chunks, and rank r has chunk r and the r-th from the end. Under causal masking all ranks then have
            as much to do.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    group, axis = Group.of(process_group), _axis(tensor, dim)
    split = Split.of(group, tensor.shape[axis], layout)
    group.call = Call.of("shard", _facts(tensor, axis, layout, {"size": tensor.shape[axis]}))
    result: Tensor = _Shard.apply(tensor, axis, split)  # type: ignore[no-untyped-call]
    return result


def unshard(
    tensor: Tensor, dim: int, process_group: Any, layout: str = "contiguous", length: int | None = None
) -> Tensor:
    """The whole tensor from the parts that ranks have, as `shard` makes them.

    Every rank is to compute the same from it. Then each has the whole gradient, and takes its part of that.

    Args:
        tensor: of any dtype and strides, on all ranks of the group of one shape but for `dim`.
        dim: the axis along which the parts are joined.
        process_group: a ProcessGroup or a one-dimensional DeviceMesh.
        layout: as `shard` was given.
        length: the size of the whole axis, where not all parts have one size.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    group = Group.of(process_group)

    def prepare() -> tuple[tuple[int, Split], Facts]:
        axis = _axis(tensor, dim)
        split = Split.of_part(group, "tensor", tensor.shape[axis], length, layout)
        own = {"tensor (its size along dim; give length= where parts differ)": tensor.shape[axis]}
        size = own if length is None else {"length": length}
        return (axis, split), _facts(tensor, axis, layout, size)

    axis, split = together(group, "unshard", prepare)
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
