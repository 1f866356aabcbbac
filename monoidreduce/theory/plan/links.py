"""Time of collectives between ranks, over the links within a node and the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monoidreduce._validate import check_int, mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan.wires import Wire

__all__ = ["Group", "Send"]


@dataclass(frozen=True)
class Send:
    """A collective, as one rank sees it.

    Attributes:
        what: what is sent, for display.
        collective: "all-gather", "all-to-all", "all-reduce", or "step" (a ring's send to the neighbour).
        bytes: bytes that the rank sends.
        seconds: its time, from latency and rate of the links.
    """

    what: str
    collective: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Group(Wire):
    """A group of ranks and their collectives.

    hardware: of each rank. size: bytes of an element. sum: bytes of an element of the accumulation dtype.
    """

    hardware: Hardware
    size: int
    sum: int

    @classmethod
    def of(cls, ranks: int, hardware: Hardware, dtype: torch.dtype) -> Group:
        if check_int("ranks", ranks, "an int >= 2") < 2:
            raise ValueError(mismatch("ranks", "an int >= 2", ranks))
        if hardware.within is None or hardware.between is None:
            raise ValueError(mismatch("hardware", "a GPU whose links were measured", hardware.name))
        if ranks > hardware.joined and ranks % hardware.joined:
            expected = f"at most {hardware.joined}, or whole nodes of as many"
            raise ValueError(mismatch("ranks", expected, ranks))
        nodes = -(-ranks // hardware.joined)
        sums = 8 if dtype == torch.float64 else 4
        return cls(ranks, nodes, hardware.within, hardware.between, hardware, dtype.itemsize, sums)

    def chunk(self, count: int) -> int:
        """Size of the largest shard of `count`, as torch.chunk splits it."""
        return -(-count // self.ranks)

    def gather(self, what: str, whole: float) -> Send:
        """An all-gather by a ring over all ranks."""
        sent = whole * (self.ranks - 1) / self.ranks
        return Send(what, "all-gather", sent, self.gather_seconds(whole))

    def exchange(self, what: str, buffer: float) -> Send:
        """An all-to-all: each rank's buffer has one part for every rank."""
        sent = buffer * (self.ranks - 1) / self.ranks
        return Send(what, "all-to-all", sent, self.exchange_seconds(buffer))

    def all_reduce(self, what: str, whole: float) -> Send:
        """A reduce-scatter and an all-gather."""
        half = self.gather(what, whole)
        return Send(what, "all-reduce", 2 * half.bytes, 2 * half.seconds)

    def step(self, what: str, bytes: float) -> Send:
        """A send to the next rank of a ring."""
        return Send(what, "step", bytes, self.send_seconds(bytes))

    def total(self, what: str, elements: float, own: bool, rounded: bool = False) -> tuple[list[Send], float]:
        """`sum_over_ranks` of `elements`: its collectives, and the bytes that a rank moves in its own memory.

        own: each rank needs its share only (a reduce-scatter). rounded: parts are sent in the elements'
        dtype, not in the accumulation dtype.
        """
        part, share = (self.size if rounded else self.sum), elements / self.ranks
        sends = [self.exchange(what, part * elements)]
        if not own:
            sends.append(self.gather(what, self.size * elements))
        # The first part starts the sum, the last addition writes the result; `more` parts are added between.
        more = max(self.ranks - 2, 0)
        begun = part + self.sum if more and part != self.sum else 0
        added = more * (2 * self.sum + part) + (self.sum if more else part) + part + self.size
        return sends, share * (begun + added)

    def copying(self, moved: float) -> float:
        """Seconds to read or write `moved` bytes in device memory."""
        measured = self.hardware.measured
        return moved / (self.hardware.bandwidth if measured is None else measured.bandwidth)
