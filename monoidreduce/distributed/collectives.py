"""The collectives that calls over several devices use.

Sums are taken in the order of ranks, in one place, so they have the same bits in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.distributed.group import Group

__all__ = ["exchange", "gather_states", "sum_over_ranks"]


def gather_states(fields: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each field [...] -> [ranks, ...], all of them by one collective."""
    flat = [field.contiguous().view(-1).view(torch.uint8) for field in fields]
    found = group.gather(torch.cat(flat))
    ends = accumulate(len(part) for part in flat)
    return [
        found[:, end - len(part) : end].clone().view(field.dtype).view(group.size, *field.shape)
        for field, part, end in zip(fields, flat, ends, strict=True)
    ]


def exchange(parts: Tensor, group: Group) -> Tensor:
    """[ranks, ...], of which part i goes to rank i -> [ranks, ...], of which part i came from rank i."""
    found = parts.new_empty(parts.shape)
    dist.all_to_all_single(found.view(-1), parts.contiguous().view(-1), group=group.handle)
    return found


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
    first, *others = exchange(flat.view(group.size, share), group).to(sums)
    for other in others:
        first += other
    total: Tensor = first.to(dtype)
    if own:
        return total.view(len(part) // group.size, *part.shape[1:])
    return group.gather(total).view(-1)[: part.numel()].view(part.shape)
