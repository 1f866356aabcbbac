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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from monoidreduce.program.graph import Expression, Graph, Node
from monoidreduce.program.operations import LEAVES, OPERATIONS
from monoidreduce.program.program import Program, operands, parse, reachable

__all__ = [
    "Gradient",
    "Sums",
    "column_sums",
    "exchanged",
    "gradient",
    "is_of_distance",
    "key_step",
    "modified_sums",
    "row_sums",
    "slopes",
]


@dataclass(frozen=True)
class Gradient:
    """The gradients of an element by its leaves, numbers of `nodes`; by data None where it is 0.

    What is known of the row comes as data of rows, behind the program's data of rows. It is the row's values,
    the low words of the log-sum-exps, and the gradients of the values. Behind the program's integers come the
    columns of the largest.
    """

    nodes: Graph
    score: int
    other: int | None  # if there is one
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]


def _add(adjoint: dict[int, Expression], number: int, term: Expression) -> None:
    adjoint[number] = adjoint[number] + term if number in adjoint else term


def pull_back(graph: Graph, nodes: Sequence[Node], adjoint: dict[int, Expression]) -> None:
    """The gradients by all that some nodes are made of.

    adjoint: the gradients by the results, to which it adds the others. graph: begins with the nodes.
    """
    for number in range(len(nodes) - 1, -1, -1):
        name, *args = nodes[number]
        if number not in adjoint or name in LEAVES:
            continue
        pull = OPERATIONS[name].pull
        if pull is None:
            continue
        arguments = [Expression(graph, i) for i in args]
        pulled = pull(adjoint[number], Expression(graph, number), *arguments)
        for argument, by_argument in zip(arguments, pulled, strict=True):
            if by_argument is not None and argument.constant is None:
                _add(adjoint, argument.number, by_argument)


def count(program: Program, leaf: str) -> int:
    """How many data of a kind a program has."""
    return 1 + max((node[1] for node in program.nodes if node[0] == leaf), default=-1)


@lru_cache(256)
def gradient(text: str, rows: int, row_indices: int) -> Gradient:
    """rows, row_indices: how many data of rows a call of the program has."""
    program = parse(text)
    graph = Graph(program.nodes)
    adjoint: dict[int, Expression] = {}
    add = partial(_add, adjoint)

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

    pull_back(graph, program.nodes, adjoint)
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


def sums(nodes: Iterable[Node], gradients: Sequence[int | None]) -> Sums | None:
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
    return sums(of.nodes.nodes, of.rows)


@lru_cache(256)
def column_sums(text: str, rows: int, row_indices: int) -> Sums | None:
    """The gradients of data of columns are totals over the rows: the same with rows and columns exchanged.

    The columns' number is then the last integer of a row.
    """
    of = gradient(text, rows, row_indices)
    return sums(exchanged(of.nodes.nodes, count(parse(text), "column_index")), of.columns)


def exchanged(nodes: Iterable[Node], column_indices: int) -> Iterator[Node]:
    """The same nodes where columns are rows; their number is the last of the integers of a row."""
    names = {"row": "column", "column": "row", "row_index": "column_index", "column_index": "row_index"}
    for name, *rest in nodes:
        yield ("row_index", column_indices) if name == "position" else (names.get(name, name), *rest)


# Attention. Its program has a total, the score, and at most one count: whether a row keeps the element.


@lru_cache(256)
def slopes(
    text: str, sizes: tuple[int, ...] | None
) -> tuple[Graph, Expression, Expression | None, Expression]:
    """The graph, the score, whether it is kept, and the derivative of the score by that without the function.

    sizes: the call's sizes, which become constants; None leaves them as leaves.
    """
    program = parse(text)
    nodes = program.nodes
    if sizes is not None:
        nodes = tuple(("integer", sizes[node[1]]) if node[0] == "size" else node for node in nodes)
    graph = Graph(nodes)
    score, *kept = (Expression(graph, number) for number in program.roots)
    adjoint = {score.number: graph.constant(1.0)}
    pull_back(graph, nodes, adjoint)
    of_leaf = {nodes[number]: of for number, of in adjoint.items()}
    return graph, score, kept[0] if kept else None, of_leaf.get(("score",), graph.constant(0.0))


def key_step(graph: Graph, score: Expression) -> Expression | None:
    """How much larger a score is than that of the key before, where all keys of a row agree, as in ALiBi.

    None where they do not, or where the score is not that without the function plus another number.
    """
    of_score, step = (_along(graph, leaf, score) for leaf in ("score", "position"))
    if of_score is None or of_score.constant != 1.0 or step is None:
        return None
    leaves = {graph.nodes[i][0] for i in reachable(graph.nodes, [step.number])}
    return None if {"score", "position"} & leaves else graph.real(step)


def is_of_distance(graph: Graph, score: Expression) -> bool:
    """Has the score a `key_step`, and sees of query and key only their difference."""
    both = {"position", "query"}
    for number in reachable(graph.nodes, [score.number]):
        of = {graph.nodes[i][0] for i in operands(graph.nodes[number])}
        if of & both and (graph.nodes[number][0], of) != ("index_sub", both):
            return False
    return key_step(graph, score) is not None


def _along(graph: Graph, leaf: str, of: Expression) -> Expression | None:
    """The derivative of a sum by a leaf, which some of its terms have as a factor; else None."""
    slope: dict[int, Expression] = {}  # of what depends on the leaf
    for number in reachable(graph.nodes, [of.number]):
        name, *_ = node = graph.nodes[number]
        arguments = [Expression(graph, i) for i in operands(node)]
        moved = [x.number in slope for x in arguments]
        by = [slope.get(x.number, graph.constant(0)) for x in arguments]
        if name == leaf:
            slope[number] = graph.constant(1.0 if leaf == "score" else 1)
        elif not any(moved):
            continue
        elif name in ("neg", "to_real"):
            slope[number] = -by[0] if name == "neg" else by[0]
        elif name in ("add", "index_add", "sub", "index_sub"):
            slope[number] = by[0] + by[1] if name.endswith("add") else by[0] - by[1]
        elif name in ("mul", "index_mul") and not all(moved):
            slope[number] = by[0] * arguments[1] if moved[0] else arguments[0] * by[1]
        elif name == "div" and not moved[1]:
            slope[number] = by[0] / arguments[1]
        else:
            return None
    return slope.get(of.number)


@lru_cache(256)
def modified_sums(
    text: str,
    sizes: tuple[int, ...],
    gathers: tuple[int, ...],
    softmax: bool,
    values: bool,
    scale: float,
    partial: bool,
    of_columns: bool,
) -> Sums | None:
    """The gradients of what a program gathers by the row, or by the column: totals of a derived program.

    Data of a row: its log-sum-exp in two words and its centre, g_lse - <G, out>; batch, head and query. A
    partial row also has the first column that it keeps and the one behind the last. The second score is
    <G, v>, if there are values.

    Args:
        text, sizes: of the program of attention.
        gathers: the nodes by which.
        softmax: are scores logarithms of weights, or weights.
        scale: of the call.
        partial: do rows keep some columns only.
    """
    program = parse(text)
    graph = Graph()
    leaves = {("score",): graph.leaf("score") * scale}
    leaves |= {(name,): graph.leaf("row_index", k) for k, name in enumerate(("batch", "head", "query"))}
    placed: list[Expression] = []
    for node in program.nodes:
        if node[0] == "size":
            placed.append(graph.constant(sizes[node[1]]))
        elif node in leaves or node[0] in LEAVES:
            placed.append(leaves[node] if node in leaves else graph.leaf(*node))
        else:
            placed.append(graph.raw(node[0], *(placed[i] for i in node[1:])))
    score, *kept = (placed[number] for number in program.roots)
    by_score = graph.leaf("other") if values else graph.constant(0.0)
    if softmax:
        high, low, centre = (graph.leaf("row", k) for k in range(3))
        by_score = graph.apply("share", score, high, low) * (by_score + centre)
    if partial:
        position, begin, end = graph.leaf("position"), *(graph.leaf("row_index", k) for k in (3, 4))
        kept += [position >= begin, position < end]
    for keep in kept:
        by_score = by_score.where(keep, by_score, 0.0)
    nodes = tuple(graph.nodes)
    adjoint = {score.number: by_score}
    pull_back(graph, nodes, adjoint)
    gradients = [adjoint[placed[i].number].number if placed[i].number in adjoint else None for i in gathers]
    return sums(exchanged(graph.nodes, 0) if of_columns else graph.nodes, gradients)
