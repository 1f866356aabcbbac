"""Meshes of chips: logical axes, each with a parallel strategy (paper, sections 2.5 and B.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_counts, check_numbers

__all__ = ["STRATEGIES", "Axis", "Mesh", "check_links", "meshes"]

# They shard: dp tokens; fsdp tokens and state; tp widths of all layers; vocab classes of the head; context
# sequences.
STRATEGIES = ("dp", "fsdp", "tp", "vocab", "context")


@dataclass(frozen=True)
class Axis:
    """A logical axis: chips that share the work of one strategy.

    Attributes:
        strategy: one of `STRATEGIES`.
        size: the number of chips along it.
        links: the number of physical axes that it uses, the paper's m. A fraction below 1 stands for another
            network, with that fraction of one physical axis's bandwidth.

    Raises TypeError or ValueError for other values.
    """

    strategy: str
    size: int
    links: float = 1

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_counts(size=self.size)
        check_numbers(links=self.links)

    def __str__(self) -> str:
        return f"{self.strategy} {self.size} over {self.links:g} {'axis' if self.links == 1 else 'axes'}"


def check_links(hardware: Hardware, links: Mapping[str, float]) -> None:
    """Raise ValueError if the strategies need more physical axes than a chip has. Fractions need none."""
    total = sum(of for of in links.values() if of >= 1)
    if total > hardware.axes:
        given = ", ".join(f"{name} {of:g}" for name, of in links.items())
        expected = f"at most the {hardware.axes} of {hardware.name} in all"
        raise ValueError(mismatch("links", expected, f"{total:g} ({given})"))


@dataclass(frozen=True)
class Mesh:
    """Chips of one kind, arranged along independent logical axes with different strategies.

    Raises ValueError if a strategy appears twice, if the axes need more physical axes than a chip has, or if
    they need more chips than its links join.
    """

    hardware: Hardware
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.strategy for axis in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(mismatch("axes", "each strategy once", names))
        check_links(self.hardware, {axis.strategy: axis.links for axis in self.axes})
        if self.joined > self.hardware.joined:
            expected = f"at most the {self.hardware.joined} chips that the links of {self.hardware.name} join"
            raise ValueError(mismatch("size", expected, self.joined))

    @property
    def chips(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def joined(self) -> int:
        """Number of chips joined by physical axes, not counting axes over another network."""
        return _joined(self.axes)

    def size(self, *strategies: str) -> int:
        """The number of chips along the axes of these strategies; 1 if the mesh has none of them."""
        return prod(axis.size for axis in self.axes if axis.strategy in strategies)

    def __str__(self) -> str:
        return f"{self.chips} x {self.hardware.name}: {', '.join(map(str, self.axes))}"


def meshes(hardware: Hardware, chips: int, links: Mapping[str, float]) -> Iterator[Mesh]:
    """All meshes of `chips` that the hardware's links can join.

    links: the strategies, with the number of physical axes of each.

    Raises TypeError or ValueError for a strategy or number that `Axis` or `Mesh` does not accept.
    """
    check_counts(chips=chips)
    check_links(hardware, {name: Axis(name, 1, of).links for name, of in links.items()})
    for sizes in _factors(chips, len(links)):
        axes = tuple(Axis(name, size, m) for (name, m), size in zip(links.items(), sizes, strict=True))
        if _joined(axes) <= hardware.joined:
            yield Mesh(hardware, axes)


def _joined(axes: tuple[Axis, ...]) -> int:
    return prod(axis.size for axis in axes if axis.links >= 1)


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` positive ints with this product."""
    if count == 1:
        yield (product,)
    elif count > 1:
        for first in range(1, product + 1):
            if product % first == 0:
                yield from ((first, *rest) for rest in _factors(product // first, count - 1))
