"""M-partitions of a graph (Definitions E.1 to E.5), and the one that a pebble game gives (Lemma E.6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from .graph import Graph
from .pebbles import Move
from .two_level import check_sizes

__all__ = ["NotAPartition", "check_partition", "minimum_set", "partition_of", "smallest_dominator"]


_Place: TypeAlias = tuple[int, bool]


class NotAPartition(ValueError):
    """The sets of nodes violate a condition of Definition E.5."""


def smallest_dominator(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """A smallest dominator set: every path from an input to one of `nodes` meets it (Definition E.1).

    By Menger's theorem its size is the maximum number of such paths that share no node. They are found one by
    one as a maximum flow (Ford-Fulkerson) with node capacities of 1; a new path may undo steps of earlier
    ones.
    """
    targets = set(nodes)
    passed: set[int] = set()  # nodes on the paths so far
    steps: Counter[tuple[int, int]] = Counter()  # edges on the paths so far
    while True:
        # The predecessor of each place in the search. A place is (node, whether the path is leaving it).
        reached: dict[_Place, _Place | None] = {(node, False): None for node in graph.inputs}
        queue = list(reached)
        end = None
        for place in queue:
            node, leaving = place
            if leaving and node in targets:
                end = place
                break
            if leaving:
                following = [(child, False) for child in graph.children[node]]
            else:
                following = [(parent, True) for parent in graph.parents[node] if steps[parent, node]]
            if leaving == (node in passed):
                following.append((node, not leaving))
            for other in following:
                if other not in reached:
                    reached[other] = place
                    queue.append(other)
        if end is None:
            return {node for node, leaving in reached if not leaving and (node, True) not in reached}
        while (before := reached[end]) is not None:
            if before[0] == end[0]:
                passed ^= {end[0]}
            elif end[1]:
                steps[end[0], before[0]] -= 1
            else:
                steps[before[0], end[0]] += 1
            end = before


def minimum_set(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """The nodes of a set that have no child in it (Definition E.2)."""
    chosen = set(nodes)
    return {node for node in chosen if chosen.isdisjoint(graph.children[node])}


def check_partition(graph: Graph, parts: Sequence[Iterable[int]], size: int) -> None:
    """Check that `parts` are an M-partition of the graph with M = `size` (Definition E.5).

    Parts may not depend on each other cyclically. Definition E.4 as printed forbids only a cycle through all
    parts; Hong and Kung's definition, used here, forbids every cycle.

    Raises:
        NotAPartition: names the violated condition and the part.
    """
    owner: dict[int, int] = {}
    for number, part in enumerate(parts):
        for node in part:
            if owner.setdefault(node, number) != number:
                raise NotAPartition(f"node {node} is in parts {owner[node]} and {number}")
    if missing := set(range(len(graph))) - owner.keys():
        raise NotAPartition(f"nodes {sorted(missing)} are in no part")
    for number, part in enumerate(parts):
        for what, nodes in (
            ("dominator set", smallest_dominator(graph, part)),
            ("minimum set", minimum_set(graph, part)),
        ):
            if len(nodes) > size:
                raise NotAPartition(f"part {number}: {what} of {len(nodes)} nodes, expected at most {size}")
    depends_on = {
        number: {owner[parent] for node in part for parent in graph.parents[node]} - {number}
        for number, part in enumerate(parts)
    }
    try:
        TopologicalSorter(depends_on).prepare()
    except CycleError as error:
        raise NotAPartition(f"parts {error.args[1]} depend on each other") from error


def partition_of(graph: Graph, moves: Iterable[Move], pebbles: int) -> list[set[int]]:
    """The 2M-partition that a game with M red pebbles gives (the proof of Lemma E.6), checked.

    The game is cut after every M transfers. A node belongs to the segment in which it first gets a red
    pebble. A game that gives h parts has at least M (h - 1) transfers, so Q >= M (P(2M) - 1).

    Args:
        graph: the graph of the game.
        moves: a legal game (see `play`) in which every red pebble is used.
        pebbles: M.

    Raises:
        NotAPartition: a part violates a condition, because red pebbles were placed and not used.
        ValueError: `pebbles` is below 1.
    """
    check_sizes(pebbles=pebbles)
    parts: list[set[int]] = [set()]
    seen: set[int] = set()
    transfers = 0
    for operation, node in moves:
        if operation in ("input", "output"):
            if transfers and transfers % pebbles == 0:
                parts.append(set())
            transfers += 1
        if operation in ("input", "compute") and node not in seen:
            seen.add(node)
            parts[-1].add(node)
    parts = [part for part in parts if part]
    check_partition(graph, parts, 2 * pebbles)
    return parts
