"""What collectives between ranks take: the links of a node, and a network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monoidreduce._validate import check_int, mismatch
from monoidreduce.theory.hardware import Hardware, Link

__all__ = ["Group", "Send"]


@dataclass(frozen=True)
class Send:
    """A collective of one rank.

    Attributes:
        what: is sent.
        collective: "all-gather", "all-to-all", "all-reduce", or "step" of a ring to the neighbour.
        bytes: that the rank sends.
        seconds: by latency and rate of the links.
    """

    what: str
    collective: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Group:
    """Ranks, and what collectives between them take. size, sum: bytes of an element, and of a sum of such."""

    ranks: int
    hardware: Hardware
    within: Link
    between: Link
    nodes: int
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
        return cls(ranks, hardware, hardware.within, hardware.between, nodes, dtype.itemsize, sums)

    def chunk(self, count: int) -> int:
        """The longest of the ranks' parts, of torch.chunk."""
        return -(-count // self.ranks)

    def _seconds(self, bytes: float, of_network: float) -> float:
        """of_network: bytes of the device's part of the network; the links carry the others beside them."""
        latency = self.within.latency + (self.nodes - 1) * self.between.latency
        return latency + max(bytes / self.within.rate, of_network / self.between.rate)

    def gather(self, what: str, whole: float) -> Send:
        """A ring of all ranks. A node receives what others have through the networks of all its devices."""
        sent = whole * (self.ranks - 1) / self.ranks
        of_network = whole * (self.nodes - 1) / self.ranks
        return Send(what, "all-gather", sent, self._seconds(sent, of_network))

    def exchange(self, what: str, buffer: float) -> Send:
        """Each rank has a part of its buffer for each other."""
        in_node = self.ranks // self.nodes
        of_network = buffer * (self.ranks - in_node) / self.ranks
        seconds = self._seconds(buffer * (in_node - 1) / self.ranks, of_network)
        return Send(what, "all-to-all", buffer * (self.ranks - 1) / self.ranks, seconds)

    def all_reduce(self, what: str, whole: float) -> Send:
        """A reduce-scatter and an all-gather."""
        half = self.gather(what, whole)
        return Send(what, "all-reduce", 2 * half.bytes, 2 * half.seconds)

    def step(self, what: str, bytes: float) -> Send:
        """To the neighbour. Between nodes a step is as long as that of the devices at their ends."""
        latency, rate = self.within.latency, self.within.rate
        if self.nodes > 1:
            latency, rate = latency + self.between.latency, min(rate, self.between.rate)
        return Send(what, "step", bytes, latency + bytes / rate)

    def total(self, what: str, elements: float, own: bool, rounded: bool = False) -> tuple[list[Send], float]:
        """`sum_over_ranks` of so many elements, and the bytes that it moves. own: a rank wants its share.

        rounded: are parts of the elements' type, else of that of sums.
        """
        part, share = (self.size if rounded else self.sum), elements / self.ranks
        sends = [self.exchange(what, part * elements)]
        if not own:
            sends.append(self.gather(what, self.size * elements))
        more = max(self.ranks - 2, 0)  # than two: a sum is begun, and these are added to it
        begun = part + self.sum if more and part != self.sum else 0
        added = more * (2 * self.sum + part) + (self.sum if more else part) + part + self.size
        return sends, share * (begun + added)

    def copying(self, moved: float) -> float:
        """Seconds, of bytes that are read or written."""
        measured = self.hardware.measured
        return moved / (self.hardware.bandwidth if measured is None else measured.bandwidth)
