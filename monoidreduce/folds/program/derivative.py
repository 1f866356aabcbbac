"""The gradient of a program: the local gradient D of its statistics, continued by the chain rule.

For an element of a row whose statistics are known, with g the gradients of the statistics:

    log weight of a softmax    p (g_lse + sum_k g_k (f_k - mean_k)), p = exp(log weight - lse), the "share"
    log weight of an entropy   p g (lse - log weight - entropy)
    f_k of a mean              p g_k
    f of a variance            2 p g (f - mean), and p g ((f - mean)^2 - variance) for the log weight
    f of a total               g
    f of a largest             g in its column, else 0

These are propagated back through the operations to the scores and the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

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
    "hides_nan",
    "is_of_distance",
    "key_step",
    "modified_elements",
    "modified_sums",
    "row_sums",
    "slopes",
]


@dataclass(frozen=True)
class Gradient:
    """The gradients of an element's leaves, as numbers of nodes; None for data if the gradient is 0.

    The row's results are additional row data, after the program's own: the row's values, the low words of the
    log-sum-exps, and the gradients of the values. After the program's integers come the columns of the
    largest values.
    """

    nodes: Graph
    score: int
    other: int | None  # None if the program has one score
    third: int | None  # None if it has at most two
    fourth: int | None
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]
    gathers: tuple[tuple[int, int], ...] = ()  # of table entries: (gradient, number of the entry)


MOST_TOTALS: int = _C.PROGRAM["fields"]  # largest number of totals: the CPU engine's numbers per row

# The condition under which a gradient flows: a set of (node number of a condition, whether it must hold).
Guard: TypeAlias = frozenset[tuple[int, bool]]
ALWAYS: Guard = frozenset()


class Adjoint:
    """The gradients of the nodes of a graph.

    Each term has a guard. If the guard does not hold, the term is 0, even if its formula gives infinity or
    NaN there (as for a masked element). So guards are applied by selection, after all products, and not by
    multiplying with 0.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._terms: dict[int, dict[Guard, Expression]] = {}

    def add(self, number: int, term: Expression, guard: Guard = ALWAYS) -> None:
        terms = self._terms.setdefault(number, {})
        terms[guard] = terms[guard] + term if guard in terms else term

    def pull_back(self, nodes: Sequence[Node]) -> None:
        """Propagate gradients from results to arguments.

        nodes: the nodes of the graph before any were added here.
        """
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
        """The gradient of a node; None if it is 0."""
        return selected(*self._sum(number)) if number in self._terms else None

    def by_leaves(self, nodes: Sequence[Node]) -> dict[Node, Expression]:
        numbers = [number for number in self._terms if nodes[number][0] in LEAVES]
        return {nodes[number]: selected(*self._sum(number)) for number in numbers}

    def by_gathers(self, nodes: Sequence[Node]) -> dict[Node, Expression]:
        """The gradients of the entries of tables."""
        numbers = [number for number in self._terms if nodes[number][0] == "gather"]
        return {nodes[number]: selected(*self._sum(number)) for number in numbers}

    def _sum(self, number: int) -> tuple[Expression, Guard]:
        """The sum of a node's terms, and the common part of their guards, which is not yet applied."""
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


def finite_surprise(x: Expression) -> Expression:
    """Minus the logarithm of a probability, made finite so that it can be multiplied by the probability
    (monoids/entropy.h)."""
    return x.graph.apply("minimum", x, x.graph.constant(2.0**20))


def _either(graph: Graph, guards: Iterable[Guard]) -> Guard:
    """A guard that holds if at least one of these holds.

    For both branches of a `where` it is the outer guard.
    """
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
    """Number of data of a kind in a program."""
    return 1 + max((node[1] for node in program.nodes if node[0] == leaf), default=-1)


@lru_cache(256)
def gradient(text: str, rows: int, row_indices: int) -> Gradient:
    """The gradient of a program, given as text. rows, row_indices: numbers of row reals and row integers.

    A program of factors is its own gradient.
    """
    program = parse(text)
    graph = Graph(program.nodes)
    if program.factors:
        score, other, third, fourth = (*program.factors, None, None, None)[:4]
        assert score is not None
        return Gradient(
            graph, score, other, third, fourth, (None,) * rows, (None,) * count(program, "column")
        )
    adjoint = Adjoint(graph)
    counted = ALWAYS
    if program.ignored is not None:
        label, ignore_index = program.ignored
        ignored = graph.leaf("row_index", label, "int64") == ignore_index
        counted = frozenset({(ignored.number, False)})

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
        # An element with log weight -inf is excluded, even if its values are not finite.
        absent = weight == -math.inf
        guard = ALWAYS
        has_values = means or i in program.entropies
        if absent.constant is None and (has_values or program.nodes[log_weight][0] not in LEAVES):
            guard = frozenset({(absent.number, False)})
        inner = upstream(k)
        if i in program.entropies:
            e = program.first_entropy + program.entropies.index(i)
            inner = inner + upstream(e) * (finite_surprise((value(k) - weight) + low) - value(e))
        for n, mean in enumerate(means, k + 1):
            deviation, slope = node(mean) - value(n), upstream(n)
            inner = inner + upstream(n) * deviation
            if (i, n - k - 1) in program.variances:
                v = program.first_variance + program.variances.index((i, n - k - 1))
                inner = inner + upstream(v) * (deviation * deviation - value(v))
                slope = slope + 2.0 * (upstream(v) * deviation)
            adjoint.add(mean, share * slope, counted | guard)
        adjoint.add(log_weight, share * inner, counted | guard)
        k += 1 + len(means)
    for total in program.totals:
        adjoint.add(total, upstream(k), counted)
        k += 1
    for value_there, n in program.in_columns:
        at = graph.leaf("row_index", row_indices + n, "number or none")
        here = graph.leaf("position") == at
        adjoint.add(value_there, upstream(k), counted | {(here.number, True)})
        k += 1

    for n, (f, _) in enumerate(program.most):
        adjoint.add(f, graph.leaf("upstream", n), counted)

    adjoint.pull_back(program.nodes)
    of_leaf = {leaf: x.number for leaf, x in adjoint.by_leaves(program.nodes).items()}
    zero = graph.constant(0.0).number
    return Gradient(
        graph,
        of_leaf.get(("score",), zero),
        of_leaf.get(("other",), zero) if program.scores >= 2 else None,
        of_leaf.get(("third",), zero) if program.scores >= 3 else None,
        of_leaf.get(("fourth",), zero) if program.scores == 4 else None,
        tuple(of_leaf.get(("row", i)) for i in range(rows)),
        tuple(of_leaf.get(("column", i)) for i in range(count(program, "column"))),
        tuple((by.number, entry) for (_, entry), by in adjoint.by_gathers(program.nodes).items()),
    )


@dataclass(frozen=True)
class Sums:
    """A derived program of totals, which are gradients of data. of: the numbers of these data.

    kept: for each kind of data, the numbers of those that the program uses.
    """

    text: str
    of: tuple[int, ...]
    kept: Mapping[str, Sequence[int]]


def sums(nodes: Iterable[Node], gradients: Sequence[int | None]) -> tuple[Sums, ...]:
    """Programs that compute these gradients as totals, with at most MOST_TOTALS each; none if all are 0."""
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
    """The gradients of row data, which are totals over the columns, as programs."""
    of = gradient(text, rows, row_indices)
    return sums(of.nodes.nodes, of.rows)


@lru_cache(256)
def column_sums(text: str, rows: int, row_indices: int) -> tuple[Sums, ...]:
    """The gradients of column data, which are totals over the rows: programs with rows and columns exchanged.

    The column's index is then the last integer of a row.
    """
    of = gradient(text, rows, row_indices)
    return sums(exchanged(of.nodes.nodes, count(parse(text), "column_index")), of.columns)


def exchanged(nodes: Iterable[Node], column_indices: int) -> Iterator[Node]:
    """The nodes with rows and columns exchanged; the column's index becomes the last integer of a row."""
    names = {"row": "column", "column": "row", "row_index": "column_index", "column_index": "row_index"}
    for name, *rest in nodes:
        if name == "position":
            yield "row_index", column_indices, "number"
        else:
            yield names.get(name, name), *rest


# Attention. Its program has one total, the score, or two: the score and the factor of the element's weight
# (dropout). It has at most one count: whether the element is kept.


class Slopes(NamedTuple):
    """A modified score and its derivatives.

    Attributes:
        graph: the graph of all nodes.
        score: the modified score.
        keep: whether it is kept; None if always.
        slope: the derivative with respect to the score.
        factor: the factor of the weight (dropout); None if there is none.
        by_gathered: for each gather node from the table of reals with a gradient: the number of the entry's
            node, and the derivative with respect to the entry.
    """

    graph: Graph
    score: Expression
    keep: Expression | None
    slope: Expression
    factor: Expression | None
    by_gathered: tuple[tuple[int, Expression], ...]


@lru_cache(256)
def slopes(text: str, sizes: tuple[int, ...] | None) -> Slopes:
    """sizes: sizes of the call, which become constants; None keeps them as leaves."""
    program = parse(text)
    nodes = program.nodes
    if sizes is not None:
        nodes = tuple(("integer", sizes[node[1]]) if node[0] == "size" else node for node in nodes)
    graph = Graph(nodes)
    score, *factors = (Expression(graph, number) for number in program.totals)
    kept = [Expression(graph, number) for number in program.counts]
    adjoint = Adjoint(graph)
    adjoint.add(score.number, graph.constant(1.0))
    adjoint.pull_back(nodes)
    slope = adjoint.by_leaves(nodes).get(("score",), graph.constant(0.0))
    by_gathered = tuple((entry, by) for (_, entry), by in adjoint.by_gathers(nodes).items())
    return Slopes(
        graph, score, kept[0] if kept else None, slope, factors[0] if factors else None, by_gathered
    )


def key_step(graph: Graph, score: Expression) -> Expression | None:
    """The amount that score_mod adds from one key to the next, if it is the same for all keys of a row
    (ALiBi).

    None if it is not, or if the modified score is not the score plus a number.
    """
    of_score, step = (_along(graph, leaf, score) for leaf in ("score", "position"))
    if of_score is None or of_score.constant != 1.0 or step is None:
        return None
    leaves = {graph.nodes[i][0] for i in reachable(graph.nodes, [step.number])}
    return None if {"score", "position"} & leaves else graph.real(step)


def is_of_distance(graph: Graph, score: Expression) -> bool:
    """Whether the score has a `key_step` and depends on query and key only through their difference."""
    both = {"position", "query"}
    for number in reachable(graph.nodes, [score.number]):
        of = {graph.nodes[i][0] for i in operands(graph.nodes[number])}
        if of & both and (graph.nodes[number][0], of) != ("index_sub", both):
            return False
    return key_step(graph, score) is not None


def hides_nan(graph: Graph, roots: Sequence[Expression]) -> bool:
    """Whether a root may be a number where the score is NaN.

    It may if it depends on a comparison with the score, an integer made of it, or a power (x ** 0 is 1).
    """
    of_score: set[int] = set()
    for number in reachable(graph.nodes, [root.number for root in roots]):
        node = graph.nodes[number]
        if node[0] == "score" or of_score.intersection(operands(node)):
            of_score.add(number)
            if node[0] == "pow" or graph.kind(number) != "real":
                return True
    return False


def _along(graph: Graph, leaf: str, of: Expression) -> Expression | None:
    """The derivative of `of` with respect to a leaf, if `of` is linear in it; else None."""
    slope: dict[int, Expression] = {}  # derivatives of the nodes that depend on the leaf
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
    """The gradients of captured tensors that attention's program gathers by row or by column, as derived
    programs.

    Row data: the log-sum-exp in two words; integers: batch, head and query, and with `partial` the first
    column that the row keeps and the last + 1. The second score is <G, v>, where G is grad_out, if there are
    values.

    The derivative with respect to a score is p (<G, v> + c), with p the softmax probability and c = g_lse -
    sum p <G, v> (minus delta, without g_lse). With dropout <G, v> is multiplied by the element's factor. For
    columns, c is additional row data. For rows it need not be known, because the totals are linear in c:
    totals n to 2 n - 1 are its coefficients, and total 2 n is sum p <G, v>, computed from the same
    probabilities and products as the others.

    Args:
        text, sizes: the program of attention and its sizes.
        gathers: the n gather nodes whose gradients are needed.
        softmax: True if scores are logarithms of weights, False if they are weights (`attend`).
        values: whether there is a second score.
        scale: scale of the call.
        partial: whether rows keep only some columns.
        of_columns: the nodes gather by column.
    """
    modified = _modified_gradients(text, sizes, gathers, softmax, values, scale, partial, of_columns)
    nodes = exchanged(modified.nodes, 0) if of_columns else modified.nodes
    return sums(nodes, modified.gradients)


class Modified(NamedTuple):
    """The gradients of an element's gather nodes.

    gradients: numbers of nodes; None if a gradient is 0. gathers: the numbers of the gather nodes.
    """

    nodes: tuple[Node, ...]
    gradients: tuple[int | None, ...]
    gathers: tuple[int, ...]


@lru_cache(256)
def modified_elements(
    text: str,
    sizes: tuple[int, ...],
    gathers: tuple[int, ...],
    softmax: bool,
    values: bool,
    scale: float,
    partial: bool,
) -> Modified:
    """The gradients of captured tensors that attention's program gathers by row and column together.

    They belong to single elements, so they are no sums. Arguments and data are those of `modified_sums`, with
    c as row real 2.
    """
    return _modified_gradients(text, sizes, gathers, softmax, values, scale, partial, True)


def _modified_gradients(
    text: str,
    sizes: tuple[int, ...],
    gathers: tuple[int, ...],
    softmax: bool,
    values: bool,
    scale: float,
    partial: bool,
    with_c: bool,
) -> Modified:
    """See `modified_sums`. with_c: c is a row real; otherwise the gradients are linear in it."""
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
    score, *factors = (placed[number] for number in program.totals)
    kept = [placed[number] for number in program.counts]
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
    for factor in factors:
        upstream = upstream * factor
    if not softmax:
        gradients = by_gathers(upstream)
    else:
        share = graph.apply("share", score, graph.leaf("row", 0), graph.leaf("row", 1))
        if with_c:
            gradients = by_gathers(share * (upstream + graph.leaf("row", 2)))
        else:
            gradients = by_gathers(share * upstream) + by_gathers(share)
            gradients.append(selected(share * upstream, guard) if values else None)
    numbers = tuple(None if by is None else by.number for by in gradients)
    return Modified(tuple(graph.nodes), numbers, tuple(placed[i].number for i in gathers))
