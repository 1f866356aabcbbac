"""The collectives that calls over several devices use.

Sums are taken in the order of ranks, in one place, so they have the same bits in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.distributed.group import Arrival, Group, after

__all__ = ["gather_states", "start_exchange", "start_sum", "sum_over_ranks"]


def gather_states(fields: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each field [...] -> [ranks, ...], all of them by one collective."""
    flat = [field.contiguous().view(-1).view(torch.uint8) for field in fields]
    found = group.gather(torch.cat(flat))
    ends = accumulate(len(part) for part in flat)
    parts = (found[:, end - len(part) : end] for end, part in zip(ends, flat, strict=True))
    dense = (part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts)
    return [
        part.view(field.dtype).view(group.size, *field.shape)
        for field, part in zip(fields, dense, strict=True)
    ]


def start_exchange(parts: Tensor, group: Group) -> Arrival:
    """[ranks, ...], of which part i goes to rank i -> [ranks, ...], of which part i came from rank i."""
    found = parts.new_empty(parts.shape)
    sent = parts.contiguous().view(-1)
    work = dist.all_to_all_single(found.view(-1), sent, group=group.handle, async_op=True)
    return partial(after, work, found)


def sum_over_ranks(
    part: Tensor, group: Group, dtype: torch.dtype, *, sent: torch.dtype | None = None, own: bool = False
) -> Tensor:
    """The sum of every rank's part [rows, ...], rounded once, to dtype.

    A rank sums a share of the elements, in the accumulation dtype and in the order of ranks.

    sent: the dtype of parts on their way; None is the accumulation dtype. own: only this rank's rows, which
    are as many on each rank, else all.
    """
    return start_sum(part, group, dtype, sent=sent, own=own)()


def start_sum(
    part: Tensor, group: Group, dtype: torch.dtype, *, sent: torch.dtype | None = None, own: bool = False
) -> Arrival:
    """sum_over_ranks whose parts are on their way."""
    sums = accumulation_dtype(part.dtype)
    flat = part.to(sums if sent is None else sent).flatten()
    share = -(-len(flat) // group.size)
    if padding := group.size * share - len(flat):
        flat = torch.nn.functional.pad(flat, (0, padding))
    shape, elements = part.shape, part.numel()
    arrival = start_exchange(flat.view(group.size, share), group)

    def total() -> Tensor:
        first, *others = arrival().to(sums)
        for other in others:
            first += other
        found: Tensor = first.to(dtype)
        if own:
            return found.view(shape[0] // group.size, *shape[1:])
        return group.gather(found).view(-1)[:elements].view(shape)

    return total
