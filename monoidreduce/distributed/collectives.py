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

from monoidreduce._ops.memory import accumulation_dtype, one_piece
from monoidreduce.distributed.group import Arrival, Group, after

__all__ = ["gather_states", "start_exchange", "start_sum", "sum_over_ranks"]


def gather_states(fields: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each field [...] -> [ranks, ...], all of them by one collective."""
    if len({field.dtype for field in fields}) == 1:
        found = group.gather(torch.cat([field.reshape(-1) for field in fields]))
        parts = found.split([field.numel() for field in fields], 1)
        return [part.view(group.size, *f.shape) for part, f in zip(parts, fields, strict=True)]
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
    sent = one_piece(parts).view(-1)
    work = dist.all_to_all_single(found.view(-1), sent, group=group.handle, async_op=True)
    return partial(after, work, found)


def sum_over_ranks(
    part: Tensor, group: Group, dtype: torch.dtype, *, sent: torch.dtype | None = None, own: bool = False
) -> Tensor:
    """The sum of every rank's part [rows, ...], rounded once, to dtype.

    A rank sums a share of the elements, in the accumulation dtype and in the order of ranks.

    sent: the dtype of parts on their way; None: as they are. own: only this rank's rows, which are as many on
    each rank, else all.
    """
    return start_sum(part, group, dtype, sent=sent, own=own)()


def start_sum(
    part: Tensor, group: Group, dtype: torch.dtype, *, sent: torch.dtype | None = None, own: bool = False
) -> Arrival:
    """sum_over_ranks whose parts are on their way."""
    sums = accumulation_dtype(part.dtype)
    flat = (part if sent is None else part.to(sent)).flatten()
    share = -(-len(flat) // group.size)
    if padding := group.size * share - len(flat):
        flat = torch.nn.functional.pad(flat, (0, padding))
    shape, elements = part.shape, part.numel()
    arrival = start_exchange(flat.view(group.size, share), group)

    def total() -> Tensor:
        found = _sum(arrival().to(sums), dtype)
        if own:
            return found.view(shape[0] // group.size, *shape[1:])
        return group.gather(found).view(-1)[:elements].view(shape)

    return total


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[ranks, n] -> [n], their sum in the order of ranks; the last addition rounds it to dtype."""
    *parts_before, last = parts
    if not parts_before:
        return last.to(dtype)
    total, *others = parts_before
    for other in others:
        total += other
    return torch.add(total, last, out=last.new_empty(last.shape, dtype=dtype))
