"""The gradient of a program: D, derived by the chain rule from the statistics' own.

For an element of a row whose statistics are known, with g the gradients of the statistics:

    log weight of a softmax    share (g_lse + sum_k g_k (f_k - mean_k)),   share = exp(log weight - lse)
    f_k of a mean              share g_k
    f of a total               g
    f of a largest             g in its column, else 0

These are pulled back through the operations to the scores and the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from monoidreduce.program.graph import Expression, Graph, Node
from monoidreduce.program.operations import LEAVES, OPERATIONS
from monoidreduce.program.program import Program, parse

__all__ = ["Gradient", "Sums", "column_sums", "gradient", "row_sums"]


@dataclass(frozen=True)
class Gradient:
    """The gradients of an element by its leaves, numbers of `nodes`; by data None where it is 0.

    What is known of the row comes as data of rows, behind those of the program: its values, the low words of
    the log-sum-exps, and the gradients of the values; and behind its integers, the columns of the largest.
    """

    nodes: Graph
    score: int
    other: int | None  # if there is one
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]


def count(program: Program, leaf: str) -> int:
    """How many data of a kind a program has."""
    return 1 + max((node[1] for node in program.nodes if node[0] == leaf), default=-1)


@lru_cache(256)
def gradient(text: str, rows: int, row_indices: int) -> Gradient:
    """rows, row_indices: how many data of rows a call of the program has."""
    program = parse(text)
    graph = Graph(program.nodes)
    adjoint: dict[int, Expression] = {}

    def add(number: int, term: Expression) -> None:
        adjoint[number] = adjoint[number] + term if number in adjoint else term

    def value(k: int) -> Expression:
        return graph.leaf("row", rows + k)

    def upstream(k: int) -> Expression:
        return graph.leaf("row", rows + program.values + len(program.softmaxes) + k)

    def node(number: int) -> Expression:
        return Expression(graph, number)

    k = 0
    for i, (log_weight, *means) in enumerate(program.softmaxes):
        weight, low = node(log_weight), graph.leaf("row", rows + program.values + i)
        share = graph.apply("share", weight, value(k), low)
        inner = upstream(k)
        for n, mean in enumerate(means, k + 1):
            inner = inner + upstream(n) * (node(mean) - value(n))
            add(mean, share * upstream(n))
        # An element of log weight -inf is not there, whatever its f is.
        term = share * inner
        add(log_weight, weight.where(weight == -math.inf, 0.0, term) if means else term)
        k += 1 + len(means)
    for total in program.totals:
        add(total, upstream(k))
        k += 1
    for n, largest in enumerate(program.largest):
        at = graph.leaf("row_index", row_indices + n)
        add(largest, at.where(graph.leaf("position") == at, upstream(k), 0.0))
        k += 1

    for number in range(len(program.nodes) - 1, -1, -1):
        name, *args = program.nodes[number]
        if number not in adjoint or name in LEAVES:
            continue
        pull = OPERATIONS[name].pull
        if pull is None:
            continue
        pulled = pull(adjoint[number], node(number), *map(node, args))
        for argument, by_argument in zip(args, pulled, strict=True):
            if by_argument is not None and node(argument).constant is None:
                add(argument, by_argument)

    of_leaf = {program.nodes[i]: x.number for i, x in adjoint.items() if program.nodes[i][0] in LEAVES}
    zero = graph.constant(0.0).number
    return Gradient(
        graph,
        of_leaf.get(("score",), zero),
        of_leaf.get(("other",), zero) if program.scores == 2 else None,
        tuple(of_leaf.get(("row", i)) for i in range(rows)),
        tuple(of_leaf.get(("column", i)) for i in range(count(program, "column"))),
    )


@dataclass(frozen=True)
class Sums:
    """A derived program of totals. of: the numbers of the data that they are the gradients by.

    kept: of each kind of data the numbers of those that it uses.
    """

    text: str
    of: tuple[int, ...]
    kept: Mapping[str, Sequence[int]]


def _sums(nodes: Iterable[Node], gradients: Sequence[int | None]) -> Sums | None:
    """None where all gradients are 0."""
    totals = {k: number for k, number in enumerate(gradients) if number is not None}
    if not totals:
        return None
    program, kept = Program(tuple(nodes), totals=tuple(totals.values())).pruned()
    return Sums(program.text, tuple(totals), kept)


@lru_cache(256)
def row_sums(text: str, rows: int, row_indices: int) -> Sums | None:
    """The gradients of data of rows are totals over the columns: a program of its own."""
    of = gradient(text, rows, row_indices)
    return _sums(of.nodes.nodes, of.rows)


@lru_cache(256)
def column_sums(text: str, rows: int, row_indices: int) -> Sums | None:
    """The gradients of data of columns are totals over the rows: the same with rows and columns exchanged.

    The columns' number is then the last integer of a row.
    """
    of = gradient(text, rows, row_indices)
    exchanged = {"row": "column", "column": "row", "row_index": "column_index", "column_index": "row_index"}
    position = ("row_index", count(parse(text), "column_index"))
    nodes = (
        position if name == "position" else (exchanged.get(name, name), *rest)
        for name, *rest in of.nodes.nodes
    )
    return _sums(nodes, of.columns)
