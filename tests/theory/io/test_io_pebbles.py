"""Pebble games on computational graphs, and the partitions that they make."""

from __future__ import annotations

import heapq
import random
from itertools import combinations

import pytest

from monoidreduce.io import (
    ALGORITHMS,
    REGISTERS,
    Graph,
    IllegalMove,
    Move,
    NotAPartition,
    TracedMemory,
    attention_backward_graph,
    attention_forward_graph,
    attention_problem,
    check_partition,
    minimum_set,
    optimum,
    partition_of,
    play,
    product_graph,
    smallest_dominator,
)

INPUTS = {"g": "A1 A2 A3 dO X Y O l", "dQ, dK, dV": "Q K V dO O l", "O": "Q K V"}
WITHOUT_FORWARD = ("Algorithm 1", "Algorithm 6")  # they compute l, and need no O


def trace(name: str, n: int, d: int, words: int) -> TracedMemory:
    """A run of an algorithm on nodes."""
    algorithm = ALGORITHMS[name]
    problem = attention_problem(n, d)
    names = "A1 A2 A3 dO X Y" if name in WITHOUT_FORWARD else INPUTS[algorithm.computes]
    shapes = {name: (problem[name].shape[0], problem[name].shape[1]) for name in names.split()}
    memory = TracedMemory(words, shapes, strict=algorithm.fits)
    algorithm.schedule(memory)
    return memory


def dot_product() -> Graph:
    """a1 b1 + a2 b2: nodes 0 and 1 are a, 2 and 3 are b, 4 and 5 their products, 6 the sum."""
    return product_graph(1, 1, 2)


def random_graph(seed: int, nodes: int) -> Graph:
    """Of at most two parents a node."""
    choice = random.Random(seed)
    graph = Graph()
    for node in range(nodes):
        graph.add(*choice.sample(range(node), choice.randint(0, min(2, node))))
    return graph


# Graphs


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_summation_trees(depth: int) -> None:
    """Figure 3: 1 + log2(d) layers of d products and d - 1 sums for each entry."""
    graph = product_graph(3, 2, depth)
    assert len(graph) == 3 * depth + depth * 2 + 3 * 2 * (2 * depth - 1)
    layers: list[int] = []
    for parents in graph.parents:
        layers.append(1 + max(layers[parent] for parent in parents) if parents else 0)
    assert {layers[node] for node in graph.outputs} == {depth.bit_length()}
    assert len(graph.outputs) == 6 and len(graph.inputs) == 5 * depth


def test_graphs_of_attention() -> None:
    """All of A1, A2, A3, X and Y, and dO backward, are inputs; O or g are the outputs."""
    forward, backward = attention_forward_graph(3, 2), attention_backward_graph(3, 2)
    assert len(forward.inputs) == 3 * 3 * 2 + 2 * 2 * 2 and len(forward.outputs) == 3 * 2
    assert len(backward.inputs) == 4 * 3 * 2 + 2 * 2 * 2 and len(backward.outputs) == 2 * 2


# Games


def test_a_legal_game() -> None:
    moves = [Move("input", node) for node in range(4)]
    moves += [Move("compute", 4), Move("compute", 5), Move("compute", 6), Move("output", 6)]
    assert play(dot_product(), moves, 7) == 5


@pytest.mark.parametrize(
    ("moves", "pebbles", "complaint"),
    [
        ([Move("input", 4)], 3, "move 0: input of node 4"),
        ([Move("input", 0), Move("compute", 4)], 3, "move 1: compute of node 4"),
        ([Move("compute", 0)], 3, "move 0: compute of node 0"),
        ([Move("output", 6)], 3, "move 0: output of node 6"),
        ([Move("input", 0), Move("delete", 1)], 3, "move 1: delete of node 1"),
        ([Move("input", 0), Move("input", 1)], 1, "move 1: 2 red pebbles, expected at most 1"),
        ([Move("input", 0)], 3, r"no blue pebbles on outputs \[6\]"),
    ],
)
def test_illegal_moves(moves: list[Move], pebbles: int, complaint: str) -> None:
    with pytest.raises(IllegalMove, match=complaint):
        play(dot_product(), moves, pebbles)


def test_best_games() -> None:
    """A dot product of two with 3 pebbles must write and read its first term; 4 are enough."""
    graph = dot_product()
    assert [play(graph, optimum(graph, pebbles), pebbles) for pebbles in (3, 4, 5)] == [7, 5, 5]
    outer = product_graph(2, 2, 1)  # four operands and four results, if two operands stay while others come
    assert [play(outer, optimum(outer, pebbles), pebbles) for pebbles in (3, 4, 5)] == [9, 8, 8]


def fewest_transfers(graph: Graph, pebbles: int) -> int:
    """Q(G, M), by Dijkstra's algorithm over single moves."""
    start = (frozenset[int](), frozenset(graph.inputs))
    costs, queue = {start: 0}, [(0, 0, start)]
    while True:
        cost, _, (red, blue) = heapq.heappop(queue)
        if graph.outputs <= blue:
            return cost
        following = [(red - {node}, blue, 0) for node in red] + [(red, blue | {node}, 1) for node in red]
        if len(red) < pebbles:
            following += [(red | {node}, blue, 1) for node in blue]
            computed = (
                node for node, parents in enumerate(graph.parents) if parents and red.issuperset(parents)
            )
            following += [(red | {node}, blue, 0) for node in computed]
        for *places, step in following:
            state = (places[0], places[1])
            if cost + step < costs.get(state, cost + step + 1):
                costs[state] = cost + step
                heapq.heappush(queue, (cost + step, len(costs) + len(queue), state))


@pytest.mark.parametrize("seed", [*range(8), 263])  # 263: a place is found by a longer way first
def test_best_games_of_random_graphs(seed: int) -> None:
    graph = random_graph(seed, 9)
    for pebbles in (3, 4):
        game = optimum(graph, pebbles)
        assert play(graph, game, pebbles) == fewest_transfers(graph, pebbles)


def test_what_the_search_refuses() -> None:
    with pytest.raises(ValueError, match="graph: expected at most 14 nodes, got 20"):
        optimum(product_graph(2, 2, 2), 8)
    with pytest.raises(ValueError, match="pebbles: expected at least 3, got 2"):
        optimum(dot_product(), 2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("pebbles", [3, 4, 6])
def test_partitions_of_best_games(shape: tuple[int, int, int], pebbles: int) -> None:
    """Lemma E.6: Q >= M (h - 1) with the h parts of a 2M-partition, which partition_of checks."""
    graph = product_graph(*shape)
    game = optimum(graph, pebbles)
    assert play(graph, game, pebbles) >= pebbles * (len(partition_of(graph, game, pebbles)) - 1)


@pytest.mark.parametrize("words", [20, 40])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_of_algorithms_are_games(name: str, words: int) -> None:
    """The same number of transfers, with room for a product and a sum beside the cache; and Lemma E.6."""
    if name == "Algorithm 1":
        words += 4
    memory = trace(name, 2, 2, words)
    pebbles = memory.peak + REGISTERS
    assert play(memory.graph, memory.moves, pebbles) == memory.io == ALGORITHMS[name].words(2, 2, words)
    assert memory.io >= pebbles * (len(partition_of(memory.graph, memory.moves, pebbles)) - 1)


def test_a_traced_schedule_that_forgets_to_write() -> None:
    memory = TracedMemory(8, {"a": (1, 2)})
    memory.create("b", 1, 2)
    with pytest.raises(ValueError, match="input: a block with entries that were never computed"):
        memory.read("b")


# Partitions


def is_dominated(graph: Graph, nodes: set[int], by: set[int]) -> bool:
    """Definition E.1, by following all paths."""
    reached = graph.inputs - by
    for node, parents in enumerate(graph.parents):
        if node not in by and not reached.isdisjoint(parents):
            reached.add(node)
    return reached.isdisjoint(nodes)


@pytest.mark.parametrize("graph", [product_graph(1, 2, 2), *(random_graph(seed, 11) for seed in range(20))])
def test_dominator_sets_are_smallest(graph: Graph) -> None:
    everything = range(len(graph))
    for nodes in (set(chosen) for size in (2, 4) for chosen in combinations(everything, size)):
        found = smallest_dominator(graph, nodes)
        assert is_dominated(graph, nodes, found)
        assert not any(
            is_dominated(graph, nodes, set(others)) for others in combinations(everything, len(found) - 1)
        )


def test_dominator_sets_where_a_path_must_make_way() -> None:
    """Inputs 0 and 1, 2 from both, 3 from 1 and 2: paths to 2 and 3 must not both pass 2."""
    graph = Graph()
    graph.add(), graph.add(), graph.add(0, 1), graph.add(1, 2)
    assert len(smallest_dominator(graph, {2, 3})) == 2
    assert len(smallest_dominator(graph, {0, 1, 2, 3})) == 2
    assert smallest_dominator(graph, set()) == set()


def test_dominator_sets_where_a_path_undoes_a_step_for_good() -> None:
    graph = Graph()
    for parents in ((), (), (), (), (0, 1, 2), (1, 2, 4), (0, 2), (0,), (0, 7), (2, 3, 4, 8), (2, 6), (6, 9)):
        graph.add(*parents)
    graph.add(5, 8, 9, 10), graph.add(10)
    assert smallest_dominator(graph, {7, 9, 11, 13}) == {0, 2, 9}


def test_minimum_sets() -> None:
    graph = dot_product()
    assert minimum_set(graph, {0, 2, 4}) == {4}
    assert minimum_set(graph, {0, 4, 5}) == {4, 5}
    assert minimum_set(graph, {0, 6}) == {0, 6}


@pytest.mark.parametrize(
    ("parts", "size", "complaint"),
    [
        ([{0, 1, 2}, {3, 4, 5}], 4, r"nodes \[6\] are in no part"),
        ([{0, 1, 2, 3}, {3, 4, 5, 6}], 4, "node 3 is in parts 0 and 1"),
        ([{0, 1, 2, 3}, {4, 5, 6}], 3, "part 0: dominator set of 4 nodes, expected at most 3"),
        ([{0, 1, 6}, {2, 3, 4, 5}], 4, r"parts \[.*\] depend on each other"),
    ],
)
def test_what_is_no_partition(parts: list[set[int]], size: int, complaint: str) -> None:
    with pytest.raises(NotAPartition, match=complaint):
        check_partition(dot_product(), parts, size)


def test_a_minimum_set_that_is_too_large() -> None:
    """One input with three children: its dominator set is one node."""
    graph = Graph()
    for parents in ((), (0,), (0,), (0,)):
        graph.add(*parents)
    check_partition(graph, [{0, 1, 2, 3}], 3)
    with pytest.raises(NotAPartition, match="part 0: minimum set of 3 nodes, expected at most 2"):
        check_partition(graph, [{0, 1, 2, 3}], 2)


def test_a_cycle_through_some_of_the_parts() -> None:
    """Definition E.4 as printed asks for a cycle through all; two of three parts are enough here."""
    graph = dot_product()
    graph.add()
    with pytest.raises(NotAPartition, match="depend on each other"):
        check_partition(graph, [{0, 1, 6}, {2, 3, 4, 5}, {7}], 6)


def test_a_partition() -> None:
    check_partition(dot_product(), [{0, 2, 4}, {1, 3, 5}, {6}], 2)
