"""Meshes of chips: logical axes, each with a parallel strategy (paper, sections 2.5 and B.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.hardware import NETWORKS, Hardware, Link
from monoidreduce.theory.plan._positive import check_counts, check_numbers
from monoidreduce.theory.plan.topology import logical_strides
from monoidreduce.theory.plan.wires import Wire

__all__ = ["STRATEGIES", "Axis", "Mesh", "check_links", "meshes"]

# They shard: dp tokens; fsdp tokens and state; tp widths of all layers; vocab classes of the head; context
# sequences; pipeline layers; expert tokens, and the experts of a layer.
STRATEGIES = ("dp", "fsdp", "tp", "vocab", "context", "pipeline", "expert")

_LATENCY = 2e-5  # seconds of a collective over links that nobody measured here


@dataclass(frozen=True)
class Axis:
    """A logical axis: chips that share the work of one strategy.

    Attributes:
        strategy: one of `STRATEGIES`.
        size: the number of chips along it.
        links: on a torus, the number of physical axes that it uses, the paper's m. Or the name of a network
            in `NETWORKS` that all its traffic goes through.

    Raises TypeError or ValueError for other values.
    """

    strategy: str
    size: int
    links: float | str = 1

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_counts(size=self.size)
        if isinstance(self.links, str):
            check_choice("links", self.links, tuple(NETWORKS))
        else:
            check_numbers(links=self.links)

    @property
    def physical(self) -> float:
        """The number of physical axes that it uses; 0 for a network."""
        return 0 if isinstance(self.links, str) else self.links

    def __str__(self) -> str:
        name = f"{self.strategy} {self.size}"
        if isinstance(self.links, str):
            return f"{name} over {self.links}"
        return name if self.links == 1 else f"{name} over {self.links:g} axes"


def check_links(hardware: Hardware, links: Mapping[str, float]) -> None:
    """Raise ValueError if strategies need more physical axes of a torus than a chip has."""
    total = sum(links.values())
    if hardware.axes > 1 and total > hardware.axes:
        given = ", ".join(f"{name} {of:g}" for name, of in links.items())
        expected = f"at most the {hardware.axes} of {hardware.name} in all"
        raise ValueError(mismatch("links", expected, f"{total:g} ({given})"))


@dataclass(frozen=True)
class Mesh:
    """Chips of one kind, arranged along independent logical axes with different strategies.

    Neighbours along the last axis lie together (B.1). Of a device with a switch, the last axes share a node
    as far as its `joined` chips go; the rest of an axis goes over `network`.

    Attributes:
        hardware, axes: the chips, and how they are arranged.
        network: between nodes: a name in `NETWORKS`, or None for the hardware's own.

    Raises ValueError if a strategy appears twice, if the axes need more physical axes than a chip has, if
    they need more chips than links and network join, or for an unknown network.
    """

    hardware: Hardware
    axes: tuple[Axis, ...]
    network: str | None = None

    def __post_init__(self) -> None:
        names = [axis.strategy for axis in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(mismatch("axes", "each strategy once", names))
        if self.network is not None:
            check_choice("network", self.network, tuple(NETWORKS))
        check_links(self.hardware, {axis.strategy: axis.physical for axis in self.axes})
        if self.joined > self.hardware.joined and (self.is_torus or self.between is None):
            expected = f"at most the {self.hardware.joined} chips that the links of {self.hardware.name} join"
            raise ValueError(mismatch("size", expected, self.joined))

    @property
    def is_torus(self) -> bool:
        """Whether chips have several physical axes, instead of a switch."""
        return self.hardware.axes > 1

    @property
    def between(self) -> Link | None:
        """Each chip's share of the network between nodes."""
        return self.hardware.between if self.network is None else NETWORKS[self.network]

    @property
    def chips(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def joined(self) -> int:
        """Number of chips along the axes that use the hardware's own links."""
        return prod(axis.size for axis in self.axes if axis.physical)

    def size(self, *strategies: str) -> int:
        """The number of chips along the axes of these strategies; 1 if the mesh has none of them."""
        return prod(axis.size for axis in self.axes if axis.strategy in strategies)

    def wire(self, reached: float, *strategies: str) -> Wire:
        """The links and networks between chips that differ along the axes of these strategies only.

        reached: the fraction of published rates that collectives reach.
        """
        strides = logical_strides(tuple(axis.size for axis in self.axes))
        axes = [
            (axis, stride)
            for axis, stride in zip(self.axes, strides, strict=True)
            if axis.strategy in strategies and axis.size > 1
        ]
        ranks = prod(axis.size for axis, _ in axes)
        named = next((axis.links for axis, _ in axes if isinstance(axis.links, str)), None)
        between = self.between if named is None else NETWORKS[named]
        if between is not None:
            between = Link(reached * between.rate, between.latency, between.source)
        measured = self.hardware.within
        if self.is_torus:
            physical = max(sum(axis.physical for axis, _ in axes), 1)
            within = Link(reached * physical * self.hardware.link, 1e-6, "a torus")
            nodes = prod(axis.size for axis, _ in axes if isinstance(axis.links, str))
        else:
            within = measured or Link(reached * self.hardware.link, _LATENCY, "a switch")
            nodes = prod(axis.size // self._in_node(axis, stride) for axis, stride in axes)
        return Wire(ranks, nodes, within, between)

    def _in_node(self, axis: Axis, stride: int) -> int:
        """How many chips of an axis share a node."""
        if isinstance(axis.links, str):
            return 1
        room = max(1, self.hardware.joined // stride)
        return next(n for n in range(min(room, axis.size), 0, -1) if axis.size % n == 0)

    def __str__(self) -> str:
        network = "" if self.network is None else f"; {self.network} between nodes"
        return f"{self.chips} x {self.hardware.name}: {', '.join(map(str, self.axes))}{network}"


def meshes(
    hardware: Hardware, chips: int, strategies: Sequence[str] | Sequence[Axis], network: str | None = None
) -> Iterator[Mesh]:
    """All meshes of `chips` whose axes have these strategies, in this order.

    strategies: names, or axes whose sizes are ignored.

    Raises TypeError or ValueError for a strategy or number that `Axis` or `Mesh` does not accept.
    """
    check_counts(chips=chips)
    kinds = [axis if isinstance(axis, Axis) else Axis(axis, 1) for axis in strategies]
    Mesh(hardware, tuple(replace(kind, size=1) for kind in kinds), network)  # what is wrong for all of them
    for sizes in _factors(chips, len(kinds)):
        axes = tuple(replace(kind, size=size) for kind, size in zip(kinds, sizes, strict=True))
        with suppress(ValueError):
            yield Mesh(hardware, axes, network)


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` positive ints with this product."""
    if count == 1:
        yield (product,)
    elif count > 1:
        for first in range(1, product + 1):
            if product % first == 0:
                yield from ((first, *rest) for rest in _factors(product // first, count - 1))
