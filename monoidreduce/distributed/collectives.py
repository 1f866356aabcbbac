"""The collectives that calls over several devices use.

Sums are taken in the order of ranks, in one place, so they have the same bits in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.distributed.group import Group
from monoidreduce.distributed.messages import Arrival

__all__ = ["gather_states", "start_sum", "sum_over_ranks"]


def gather_states(fields: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Each field [...] -> [ranks, ...], all of them by one collective."""
    alike = len({field.dtype for field in fields}) == 1  # else they travel as bytes
    flat = [field.reshape(-1) if alike else field.contiguous().view(-1).view(torch.uint8) for field in fields]
    found = group.gather(torch.cat(flat))
    ends = accumulate(len(part) for part in flat)
    parts = [found[:, end - len(part) : end] for end, part in zip(ends, flat, strict=True)]
    if not alike:
        dense = (part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts)
        parts = [part.view(field.dtype) for field, part in zip(fields, dense, strict=True)]
    return [part.view(group.size, *field.shape) for field, part in zip(fields, parts, strict=True)]


def sum_over_ranks(
    part: Tensor,
    group: Group,
    dtype: torch.dtype,
    *,
    sent: torch.dtype | None = None,
    own: bool = False,
    headed: bool = False,
) -> Tensor:
    """The sum of every rank's part [rows, ...], rounded once, to dtype.

    A rank sums a share of the elements, in the accumulation dtype and in the order of ranks.

    sent: the dtype of parts on their way, the same on all ranks; None: that of sums. own: only this rank's
    rows, which are as many on each rank, else all. headed: have parts a header also on a GPU.
    """
    return start_sum(part, group, dtype, sent=sent, own=own, headed=headed)()


def start_sum(
    part: Tensor,
    group: Group,
    dtype: torch.dtype,
    *,
    sent: torch.dtype | None = None,
    own: bool = False,
    headed: bool = False,
) -> Arrival:
    """sum_over_ranks whose parts are on their way."""
    shape, elements = part.shape, part.numel()
    share = -(-elements // group.size)
    part = part.to(accumulation_dtype(part.dtype) if sent is None else sent)
    if padding := group.size * share - elements:
        part = torch.nn.functional.pad(part.flatten(), (0, padding))
    arrival = group.start_exchange(part.reshape(group.size, share), headed)

    def total() -> Tensor:
        found = _sum(arrival(), dtype)
        if own:
            return found.view(shape[0] // group.size, *shape[1:])
        whole = group.start_gather(found, headed=False)().reshape(-1)
        return (whole[:elements] if padding else whole).view(shape)

    return total


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[ranks, n] -> [n], their sum in the order of ranks. The last addition rounds it to dtype."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total, *others, last = parts.unbind()
    if not others and dtype == parts.dtype:  # torch adds two numbers of 16 bits in float32, as below
        return total + last
    total = total.to(accumulation_dtype(parts.dtype))
    for other in others:
        total += other
    return torch.add(total, last, out=last.new_empty(last.shape, dtype=dtype))
