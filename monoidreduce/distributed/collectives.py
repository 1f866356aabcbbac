"""Collectives of calls over several ranks.

A sum over ranks is computed in rank order, each element on one rank. So it has the same bits in every run and
on every rank.
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
    """All-gather each field [...] -> [ranks, ...], all of them in one collective."""
    alike = len({field.dtype for field in fields}) == 1  # fields of several dtypes are sent as bytes
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
    """The sum over ranks of `part` [rows, ...], rounded once, to dtype.

    Each rank sums an equal share of the elements, in the accumulation dtype and in rank order.

    sent: dtype in which parts are communicated, the same on all ranks; None is the accumulation dtype. own:
    return only this rank's rows (a reduce-scatter; the ranks have equally many) instead of all. headed: send
    a header with the parts even on a GPU; see Channel.start.
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
    """Start `sum_over_ranks`; the returned function waits for the parts and returns the sum."""
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
    """[ranks, n] -> [n], summed in rank order. The last addition rounds to dtype."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total, *others, last = parts.unbind()
    if not others and dtype == parts.dtype:  # torch adds 16-bit numbers in float32, so this is the same
        return total + last
    total = total.to(accumulation_dtype(parts.dtype))
    for other in others:
        total += other
    return torch.add(total, last, out=last.new_empty(last.shape, dtype=dtype))
