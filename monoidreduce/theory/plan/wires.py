"""Time of collectives between chips, over the links within a node and the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce.theory.hardware import Link

__all__ = ["Wire"]


@dataclass(frozen=True)
class Wire:
    """Chips that communicate: `ranks` of them, evenly over `nodes` nodes.

    within: each chip's links in its node. between: each chip's share of the network between nodes; unused if
    there is one node.
    """

    ranks: int
    nodes: int
    within: Link
    between: Link | None

    def _seconds(self, bytes: float, of_network: float) -> float:
        """Time to send `bytes` over the links within nodes and, at the same time, `of_network` bytes a device
        over the network."""
        seconds, latency = bytes / self.within.rate, self.within.latency
        if self.nodes > 1:
            assert self.between is not None
            seconds = max(seconds, of_network / self.between.rate)
            latency += (self.nodes - 1) * self.between.latency
        return latency + seconds

    def gather_seconds(self, whole: float) -> float:
        """An all-gather, or a reduce-scatter, of `whole` bytes by a ring over all ranks.

        A node receives other nodes' parts through the network ports of all its devices.
        """
        if self.ranks == 1:
            return 0.0
        return self._seconds(whole * (self.ranks - 1) / self.ranks, whole * (self.nodes - 1) / self.ranks)

    def reduce_seconds(self, whole: float) -> float:
        """An all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(whole)

    def exchange_seconds(self, buffer: float, across: float | None = None) -> float:
        """An all-to-all: each rank's buffer has one part for every rank.

        across: bytes of a rank that cross the network, where a node receives once what several of its ranks
            need, and its links forward it; None if each rank is sent its own.
        """
        if self.ranks == 1:
            return 0.0
        in_node = self.ranks // self.nodes
        if across is not None:
            return self._seconds(buffer * (in_node - 1) / in_node, across)
        return self._seconds(
            buffer * (in_node - 1) / self.ranks, buffer * (self.ranks - in_node) / self.ranks
        )

    def send_seconds(self, bytes: float) -> float:
        """A send to the next rank. Over several nodes the slowest pair counts: two ranks of different
        nodes."""
        if self.ranks == 1:
            return 0.0
        latency, rate = self.within.latency, self.within.rate
        if self.nodes > 1:
            assert self.between is not None
            latency, rate = latency + self.between.latency, min(rate, self.between.rate)
        return latency + bytes / rate
