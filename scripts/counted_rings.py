"""The collectives of Table 2 by sends between two ranks, over a transport that counts their bytes.

A rank sends to both neighbours of a ring, as Appendix C of the paper has it, without its dummy chunks. Parts
of an object may differ in size. Each collective is called by all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Wire", "all_gather", "all_reduce", "all_to_all", "counted", "reduce_scatter", "ring_all_to_all"]


class Wire:
    """Transport between the ranks of a group, on a CPU. sent: bytes that this rank has sent."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks, self.sent = (
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
            0,
        )

    def shift(self, out: Tensor, found: Tensor, way: int) -> None:
        """Sends `out` so many ranks to the right, and receives `found` from as many to the left."""
        to, source = (
            dist.get_global_rank(self.group, (self.rank + step) % self.ranks) for step in (way, -way)
        )
        self.sent += out.nbytes
        request = dist.isend(out, to, self.group)
        dist.recv(found, source, self.group)
        request.wait()

    def ways(self) -> list[tuple[int, int]]:
        """Both ways round the ring, and the steps each: together one to every other rank."""
        return [(1, self.ranks // 2), (-1, (self.ranks - 1) // 2)]


def all_gather(wire: Wire, parts: list[Tensor]) -> None:
    """C.1. parts: one of each rank, in place; a rank has its own."""
    for way, steps in wire.ways():
        for step in range(steps):
            own, next_one = ((wire.rank - way * passed) % wire.ranks for passed in (step, step + 1))
            wire.shift(parts[own], parts[next_one], way)


def reduce_scatter(wire: Wire, parts: list[Tensor]) -> None:
    """C.2. parts: terms of all sums, one of each rank; a rank's own becomes the sum."""
    own = parts[wire.rank].clone()  # its term counts once, and sums come from both sides
    for way, steps in wire.ways():
        part = torch.zeros_like(own)
        for distance in range(steps, 0, -1):
            target = (wire.rank + way * distance) % wire.ranks
            summed = parts[target] if distance == steps else parts[target] + part
            part = torch.empty_like(parts[(target - way) % wire.ranks])
            wire.shift(summed, part, way)
        own += part
    parts[wire.rank].copy_(own)


def all_reduce(wire: Wire, parts: list[Tensor]) -> None:
    """C.3. parts: terms of all sums, which become the sums."""
    reduce_scatter(wire, parts)
    all_gather(wire, parts)


def all_to_all(wire: Wire, parts: list[Tensor]) -> list[Tensor]:
    """Each part to its rank at once, as a switch does. The results are in the order of their ranks."""
    found = [torch.empty_like(parts[wire.rank]) for _ in parts]
    found[wire.rank].copy_(parts[wire.rank])
    for step in range(1, wire.ranks):
        wire.shift(parts[(wire.rank + step) % wire.ranks], found[(wire.rank - step) % wire.ranks], step)
    return found


def ring_all_to_all(wire: Wire, parts: list[Tensor]) -> list[Tensor]:
    """C.4: the same from neighbour to neighbour, the shorter way; half round, left."""
    found = [parts[wire.rank].clone() for _ in parts]
    for away in range(1, wire.ranks):
        way = 1 if away < wire.ranks / 2 else -1
        hops = away if way == 1 else wire.ranks - away
        held = parts[(wire.rank + away) % wire.ranks]
        for hop in range(1, hops + 1):
            source = wire.rank - way * hop
            passed = torch.empty_like(parts[(source + away) % wire.ranks])
            wire.shift(held, passed, way)
            held = passed
        found[(wire.rank - away) % wire.ranks] = held
    return found


COLLECTIVES: dict[str, Callable[[Wire, list[Tensor]], object]] = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-reduce": all_reduce,
    "all-to-all": all_to_all,
}


def counted(group: Any, collective: str, elements: int) -> tuple[int, int]:
    """Bytes of an object of float32, and those that all ranks send for it.

    The object is in as many parts as there are ranks. In an all-to-all each rank has as many elements of its
    own, and the object is all of them.
    """
    wire = Wire(group)
    parts = [*torch.zeros(elements).tensor_split(wire.ranks)]
    COLLECTIVES[collective](wire, parts)
    sent = torch.tensor(wire.sent)
    dist.all_reduce(sent, group=group)
    return 4 * elements * (wire.ranks if collective == "all-to-all" else 1), int(sent)
