"""The collectives that calls over several devices use.

Sums are taken in the order of ranks, in one place, so they have the same bits in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._validate import check_int, check_tensor, mismatch
from monoidreduce.distributed.group import Group

__all__ = ["gather_states", "shard", "sum_over_ranks", "unshard"]


def gather_states(fields: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each field [...] -> [ranks, ...], all of them by one collective."""
    flat = [field.contiguous().view(-1).view(torch.uint8) for field in fields]
    found = group.gather(torch.cat(flat))
    ends = accumulate(len(part) for part in flat)
    return [
        found[:, end - len(part) : end].clone().view(field.dtype).view(group.size, *field.shape)
        for field, part, end in zip(fields, flat, ends, strict=True)
    ]


def sum_over_ranks(
    part: Tensor, group: Group, dtype: torch.dtype, *, sent: torch.dtype | None = None, own: bool = False
) -> Tensor:
    """The sum of every rank's part [rows, ...], rounded once, to dtype.

    A rank sums a share of the elements, in the accumulation dtype and in the order of ranks.

    sent: the dtype of parts on their way; None is the accumulation dtype. own: only this rank's rows, which
    are as many on each rank, else all.
    """
    sums = accumulation_dtype(part.dtype)
    flat = part.to(sums if sent is None else sent).flatten()
    share = -(-len(flat) // group.size)
    if padding := group.size * share - len(flat):
        flat = torch.nn.functional.pad(flat, (0, padding))
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat, group=group.handle)
    first, *others = parts.view(group.size, share).to(sums)
    for other in others:
        first += other
    total: Tensor = first.to(dtype)
    if own:
        return total.view(len(part) // group.size, *part.shape[1:])
    return group.gather(total).view(-1)[: part.numel()].view(part.shape)


def shard(tensor: Tensor, dim: int, process_group: Any) -> Tensor:
    """This rank's part of a tensor that all ranks have: equally long parts of an axis, in rank order.

    Its gradient is gathered, so that all ranks have the whole one.

    Args:
        tensor: of any shape, dtype and strides; the same on all ranks of the group.
        dim: an axis whose size is a multiple of the number of ranks.
        process_group: a ProcessGroup or a one-dimensional DeviceMesh.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    group = Group.of(process_group)
    axis = _axis(tensor, dim)
    if tensor.shape[axis] % group.size:
        expected = f"an axis whose size is a multiple of {group.size} ranks"
        raise ValueError(mismatch("dim", expected, f"{dim} of {list(tensor.shape)}"))
    result: Tensor = _Shard.apply(tensor, axis, group)  # type: ignore[no-untyped-call]
    return result


def unshard(tensor: Tensor, dim: int, process_group: Any) -> Tensor:
    """The whole tensor of which each rank has a part: the parts, joined along an axis in rank order.

    Every rank is to compute the same from it. Then each has the whole gradient, of which it takes its part.

    Args:
        tensor: of any dtype and strides, of one shape on all ranks of the group.
        dim: the axis along which the parts are joined.
        process_group: a ProcessGroup or a one-dimensional DeviceMesh.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    group = Group.of(process_group)
    result: Tensor = _Unshard.apply(tensor, _axis(tensor, dim), group)  # type: ignore[no-untyped-call]
    return result


def _axis(tensor: Any, dim: int) -> int:
    axes: int = check_tensor("tensor", tensor).dim()
    if not -axes <= check_int("dim", dim) < axes:
        raise ValueError(mismatch("dim", f"one of the {axes} axes of tensor", dim))
    return dim % axes


def _part(tensor: Tensor, axis: int, group: Group) -> Tensor:
    size = tensor.shape[axis] // group.size
    return tensor.narrow(axis, group.rank * size, size)


def _joined(part: Tensor, axis: int, group: Group) -> Tensor:
    return torch.cat(tuple(group.gather(part)), axis)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, group: Group) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return _part(tensor, axis, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Unshard.apply(grad, ctx.axis, ctx.group), None, None  # type: ignore[no-untyped-call]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, group: Group) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return _joined(tensor, axis, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Shard.apply(grad, ctx.axis, ctx.group), None, None  # type: ignore[no-untyped-call]
