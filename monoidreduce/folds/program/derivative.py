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
from functools import lru_cache
from typing import TypeAlias

from monoidreduce import _C
from monoidreduce.folds.program.graph import Expression, Graph, Node
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS, Selected
from monoidreduce.folds.program.program import Program, operands, parse, reachable

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


MOST_TOTALS: int = _C.PROGRAM["fields"]  # of a program: the numbers that the CPU engine keeps of a row

# Under which conditions a gradient flows: numbers of conditions, and whether each of them holds.
Guard: TypeAlias = frozenset[tuple[int, bool]]
ALWAYS: Guard = frozenset()


class Adjoint:
    """The gradients by nodes of a graph.

    A term has a guard. Where that does not hold the term is 0, whatever it comes out as there: 0 times an
    infinity or NaN of an element that is not kept is NaN. So a term is selected last, behind all products.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._terms: dict[int, dict[Guard, Expression]] = {}

    def add(self, number: int, term: Expression, guard: Guard = ALWAYS) -> None:
        terms = self._terms.setdefault(number, {})
        terms[guard] = terms[guard] + term if guard in terms else term

    def pull_back(self, nodes: Sequence[Node]) -> None:
        """From the results to all that they are made of. nodes: the first ones of the graph."""
        for number in range(len(nodes) - 1, -1, -1):
            name, *args = nodes[number]
            pull = None if name in LEAVES else OPERATIONS[name].pull
            if number not in self._terms or pull is None:
                continue
            arguments = [Expression(self.graph, i) for i in args]
            term, _ = self._sum(number)
            guard = _either(self.graph, self._terms[number])
            pulled = pull(term, Expression(self.graph, number), *arguments)
            for argument, by_argument in zip(arguments, pulled, strict=True):
                if by_argument is None or argument.constant is not None:
                    continue
                if isinstance(by_argument, Selected):
                    literal = by_argument.condition.number, by_argument.holds
                    self.add(argument.number, by_argument.gradient, guard | {literal})
                else:
                    self.add(argument.number, by_argument, guard)

    def by(self, number: int) -> Expression | None:
        """The gradient by a node; None where it is 0."""
        return selected(*self._sum(number)) if number in self._terms else None

    def by_leaves(self, nodes: Sequence[Node]) -> dict[Node, Expression]:
        numbers = [number for number in self._terms if nodes[number][0] in LEAVES]
        return {nodes[number]: selected(*self._sum(number)) for number in numbers}

    def _sum(self, number: int) -> tuple[Expression, Guard]:
        """All terms of a node, and what their guards have in common, by which they are yet to be selected."""
        terms = self._terms[number]
        common = frozenset.intersection(*terms)
        total, *others = (selected(term, guard - common) for guard, term in terms.items())
        for term in others:
            total = total + term
        return total, common


def _holds(graph: Graph, guard: Guard) -> Expression:
    """A guard as one condition."""
    literals = [(Expression(graph, number), holds) for number, holds in sorted(guard)]
    first, *others = (condition if holds else ~condition for condition, holds in literals)
    for condition in others:
        first = first & condition
    return first


def selected(term: Expression, guard: Guard) -> Expression:
    if not guard:
        return term
    if len(guard) == 1:
        ((number, holds),) = guard
        condition = Expression(term.graph, number)
        return term.where(condition, *((term, 0.0) if holds else (0.0, term)))
    return term.where(_holds(term.graph, guard), term, 0.0)


def _either(graph: Graph, guards: Iterable[Guard]) -> Guard:
    """Whether at least one of these holds. That of the two branches of a `where` is what surrounds it."""
    either, *others = guards
    for guard in others:
        common, beside = either & guard, either ^ guard
        opposite = len(beside) == 2 and len({number for number, _ in beside}) == 1
        if opposite or common in (either, guard):
            either = common
        else:
            condition = _holds(graph, either - common) | _holds(graph, guard - common)
            either = common | {(condition.number, True)}
    return either


def count(program: Program, leaf: str) -> int:
    """How many data of a kind a program has."""
    return 1 + max((node[1] for node in program.nodes if node[0] == leaf), default=-1)


@lru_cache(256)
def gradient(text: str, rows: int, row_indices: int) -> Gradient:
    """rows, row_indices: how many data of rows a call of the program has."""
    program = parse(text)
    graph = Graph(program.nodes)
    adjoint = Adjoint(graph)

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
        # An element of log weight -inf is not there, whatever it and its f are made of.
        absent = weight == -math.inf
        guard = ALWAYS
        if absent.constant is None and (means or program.nodes[log_weight][0] not in LEAVES):
            guard = frozenset({(absent.number, False)})
        inner = upstream(k)
        for n, mean in enumerate(means, k + 1):
            inner = inner + upstream(n) * (node(mean) - value(n))
            adjoint.add(mean, share * upstream(n), guard)
        adjoint.add(log_weight, share * inner, guard)
        k += 1 + len(means)
    for total in program.totals:
        adjoint.add(total, upstream(k))
        k += 1
    for n, largest in enumerate(program.largest):
        at = graph.leaf("row_index", row_indices + n, "number or none")
        here = graph.leaf("position") == at
        adjoint.add(largest, upstream(k), frozenset({(here.number, True)}))
        k += 1

    adjoint.pull_back(program.nodes)
    of_leaf = {leaf: x.number for leaf, x in adjoint.by_leaves(program.nodes).items()}
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


def sums(nodes: Iterable[Node], gradients: Sequence[int | None]) -> tuple[Sums, ...]:
    """Programs of as many totals as one may have; none where all gradients are 0."""
    nodes = tuple(nodes)
    wanted = [(k, number) for k, number in enumerate(gradients) if number is not None]
    found = []
    for first in range(0, len(wanted), MOST_TOTALS):
        of, totals = zip(*wanted[first : first + MOST_TOTALS], strict=True)
        program, kept = Program(nodes, totals=totals).pruned()
        found.append(Sums(program.text, of, kept))
    return tuple(found)


@lru_cache(256)
def row_sums(text: str, rows: int, row_indices: int) -> tuple[Sums, ...]:
    """The gradients of data of rows are totals over the columns: programs of their own."""
    of = gradient(text, rows, row_indices)
    return sums(of.nodes.nodes, of.rows)


@lru_cache(256)
def column_sums(text: str, rows: int, row_indices: int) -> tuple[Sums, ...]:
    """The gradients of data of columns are totals over the rows: the same with rows and columns exchanged.

    The columns' number is then the last integer of a row.
    """
    of = gradient(text, rows, row_indices)
    return sums(exchanged(of.nodes.nodes, count(parse(text), "column_index")), of.columns)


def exchanged(nodes: Iterable[Node], column_indices: int) -> Iterator[Node]:
    """The same nodes where columns are rows; their number is the last of the integers of a row."""
    names = {"row": "column", "column": "row", "row_index": "column_index", "column_index": "row_index"}
    for name, *rest in nodes:
        if name == "position":
            yield "row_index", column_indices, "number"
        else:
            yield names.get(name, name), *rest


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
    adjoint = Adjoint(graph)
    adjoint.add(score.number, graph.constant(1.0))
    adjoint.pull_back(nodes)
    slope = adjoint.by_leaves(nodes).get(("score",), graph.constant(0.0))
    return graph, score, kept[0] if kept else None, slope


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
) -> tuple[Sums, ...]:
    """The gradients of what a program gathers by the row, or by the column: totals of a derived program.

    Data of a row: its log-sum-exp in two words; batch, head and query. A partial row also has the first
    column that it keeps and the one behind the last. The second score is <G, v>, if there are values.

    The derivative by a score is share (<G, v> + centre), with centre = g_lse - sum of share <G, v>. By the
    column, data of a row have its centre too. By the row it need not be known, as the total is linear in it:
    numbers n to 2 n - 1 are what it multiplies, and number 2 n is the sum of share <G, v>, from the same
    weights and products as all else.

    Args:
        text, sizes: of the program of attention.
        gathers: the n nodes by which.
        softmax: are scores logarithms of weights, or weights.
        scale: of the call.
        partial: do rows keep some columns only.
    """
    program = parse(text)
    graph = Graph()
    leaves = {("score",): graph.leaf("score") * scale}
    leaves |= {
        (name,): graph.leaf("row_index", k, "number") for k, name in enumerate(("batch", "head", "query"))
    }
    placed: list[Expression] = []
    for node in program.nodes:
        if node[0] == "size":
            placed.append(graph.constant(sizes[node[1]]))
        elif node in leaves or node[0] in LEAVES:
            placed.append(leaves[node] if node in leaves else graph.leaf(*node))
        else:
            placed.append(graph.raw(node[0], *(placed[i] for i in node[1:])))
    score, *kept = (placed[number] for number in program.roots)
    if partial:
        begin, end = (graph.leaf("row_index", k, "int64") for k in (3, 4))
        position = graph.leaf("position")
        kept += [position >= begin, position < end]
    guard = frozenset((keep.number, True) for keep in kept)

    def by_gathers(by_score: Expression) -> list[Expression | None]:
        nodes = tuple(graph.nodes)
        adjoint = Adjoint(graph)
        adjoint.add(score.number, by_score, guard)
        adjoint.pull_back(nodes)
        return [adjoint.by(placed[i].number) for i in gathers]

    upstream = graph.leaf("other") if values else graph.constant(0.0)
    if not softmax:
        gradients = by_gathers(upstream)
    else:
        share = graph.apply("share", score, graph.leaf("row", 0), graph.leaf("row", 1))
        if of_columns:
            gradients = by_gathers(share * (upstream + graph.leaf("row", 2)))
        else:
            gradients = by_gathers(share * upstream) + by_gathers(share)
            gradients.append(selected(share * upstream, guard) if values else None)
    numbers = [None if by is None else by.number for by in gradients]
    return sums(exchanged(graph.nodes, 0) if of_columns else graph.nodes, numbers)
