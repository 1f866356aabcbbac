"""The red-blue pebble game (Definition 3.4): legal games, their I/O, and optimal games on tiny graphs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from monoidreduce._validate import mismatch

from .graph import Graph
from .two_level import check_least

__all__ = ["IllegalMove", "Move", "optimum", "play"]

LARGEST_GRAPH = 14


class Move(NamedTuple):
    """One operation of Definition 3.4. A red pebble is a word in the cache, a blue one a word in memory.

    input: put a red pebble on a node that has a blue one. output: put a blue pebble on a node that has a red
    one.
    compute: put a red pebble on a node if all its parents have one. delete: remove a red pebble.

    After input and output the other pebble stays, as in Hong and Kung's game. The definition says "replace",
    but the paper's algorithms read blocks again without having written them back.
    """

    operation: Literal["input", "output", "compute", "delete"]
    node: int


class IllegalMove(ValueError):
    """A move breaks the rules, or a game does not end with blue pebbles on all outputs."""


def play(graph: Graph, moves: Iterable[Move], pebbles: int) -> int:
    """Check every move of a game; return its number of input and output operations.

    Args:
        graph: the graph of the game; its inputs start with blue pebbles.
        moves: the game.
        pebbles: M, the maximum number of red pebbles on the graph at any time.

    Raises:
        IllegalMove: names the move and the rule.
    """
    red: set[int] = set()
    blue = graph.inputs
    transfers = 0
    for number, (operation, node) in enumerate(moves):
        legal = {
            "input": node in blue,
            "output": node in red,
            "compute": bool(graph.parents[node]) and red.issuperset(graph.parents[node]),
            "delete": node in red,
        }
        if not legal[operation]:
            raise IllegalMove(f"move {number}: {operation} of node {node}, red pebbles on {sorted(red)}")
        if operation == "output":
            blue.add(node)
        elif operation == "delete":
            red.remove(node)
        else:
            red.add(node)
        if len(red) > pebbles:
            raise IllegalMove(f"move {number}: {len(red)} red pebbles, expected at most {pebbles}")
        transfers += operation in ("input", "output")
    if not graph.outputs <= blue:
        raise IllegalMove(f"no blue pebbles on outputs {sorted(graph.outputs - blue)}")
    return transfers


def optimum(graph: Graph, pebbles: int) -> list[Move]:
    """A game with the fewest input and output operations; `play` of it returns Q(G, M) (Definition 3.5).

    It is found by A* over positions of red and blue pebbles. A red pebble is removed only to make room.

    Args:
        graph: a graph of at most 14 nodes.
        pebbles: M.

    Raises:
        ValueError: the graph is larger, or there are too few pebbles for any game.
    """
    if len(graph) > LARGEST_GRAPH:
        raise ValueError(mismatch("graph", f"at most {LARGEST_GRAPH} nodes", len(graph)))
    check_least("pebbles", pebbles, 1 + max(map(len, graph.parents), default=0))
    outputs = frozenset(graph.outputs)
    start = _State(frozenset(), frozenset(graph.inputs))
    came_from: dict[_State, tuple[_State, tuple[Move, ...]]] = {}
    transfers = {start: 0}
    queue = [(len(outputs - start.blue), 0, start)]
    while True:
        _, _, state = heapq.heappop(queue)
        if outputs <= state.blue:
            break
        for moves, following in _moves(graph, state, pebbles):
            cost = transfers[state] + (moves[-1].operation != "compute")
            if cost < transfers.get(following, cost + 1):
                transfers[following] = cost
                came_from[following] = (state, moves)
                # Admissible heuristic: every output not yet written costs at least one more transfer.
                heapq.heappush(queue, (cost + len(outputs - following.blue), len(transfers), following))
    game: list[Move] = []
    while state != start:
        state, moves = came_from[state]
        game[:0] = moves
    return game


class _State(NamedTuple):
    red: frozenset[int]
    blue: frozenset[int]


def _moves(graph: Graph, state: _State, pebbles: int) -> Iterator[tuple[tuple[Move, ...], _State]]:
    """The possible next moves: one operation, preceded by a delete if it needs room.

    And the states they lead to.
    """
    red, blue = state
    for node, parents in enumerate(graph.parents):
        if node in red:
            if node not in blue:
                yield (Move("output", node),), _State(red, blue | {node})
            continue
        if parents and red.issuperset(parents):
            move, needed = Move("compute", node), frozenset(parents)
        elif node in blue:
            move, needed = Move("input", node), frozenset()
        else:
            continue
        if len(red) < pebbles:
            yield (move,), _State(red | {node}, blue)
        else:
            for old in red - needed:
                yield (Move("delete", old), move), _State(red - {old} | {node}, blue)
