"""Forward mode of programs: the derivative of a fold in a direction is a fold.

Let the operands, the data and the vectors of payload sums move in a direction. The score then moves by
<da_i, b_j> + <a_i, db_j>. That is one product, of rows [da, a] and columns [b, db]: a second score. The chain
rule gives how log weights w and what they weigh, f, move with it (dw, df). The statistics move by

    log-sum-exp of w    mean of dw
    mean of f           mean of df + (f - mean) dw, less the mean of f - mean times the mean of dw
    variance of f       mean of 2 (f - mean) df + ((f - mean)^2 - variance) dw
    total of f          total of df
    largest f           df in its column
    payload sum P       sums of f dv and of (df + f dw) v, less P times the mean of dw; without dw for a total

The mean of f - mean is 0, but for rounding errors, since two kernels compute the means. Each of these is a
statistic again, so a direction costs what a fold of two scores costs, on every engine. The gradient of such a
derivative is the product of a Hessian and the direction.

A fold of two scores would need four. There the derivative by each score is the weight of a payload, the
columns [b, db], and the products with the rows come after the fold. The part that data move is as above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from monoidreduce.folds.program.derivative import Adjoint, finite_surprise
from monoidreduce.folds.program.graph import Expression, Graph, Node
from monoidreduce.folds.program.program import Program, parse

__all__ = ["Moved", "Tangent", "tangent"]

# Whether these move: first score, second score, row reals, column reals, payload, table of reals.
Moved = tuple[bool, bool, bool, bool, bool, bool]


@dataclass(frozen=True)
class Tangent:
    """A derived program. kept: the data that it uses.

    Its row reals are the program's, their directions, the program's values, and the low words of its
    log-sum-exps. Its row integers are the
    program's and the columns of the largest values. Its column reals are the program's and their directions.
    Its table of reals is the program's, and its direction if that moves.

    values: for each value of the program, the place of its derivative; None if that is 0. deviations: for
    each value that is a mean, its softmax's log-sum-exp among the values, and the place of the mean of f -
    mean. An entropy is the mean of f = lse - w. slopes: for each softmax, the place of the derivative of its
    log-sum-exp.

    directions, vectors: whether its payload sums have the vectors dv, and whether they have v, behind dv.
    They are the program's, without what the softmax's normalization adds (P times the mean of dw).

    by_scores: for a program of two scores, the payload sums: pairs (value, score). The derivative of the
    value by the score is the weight of the columns of that score's operands.
    """

    text: str
    kept: Mapping[str, Sequence[int]]
    values: tuple[int | None, ...]
    deviations: Mapping[int, tuple[int, int]]
    slopes: tuple[int, ...]
    directions: bool
    vectors: bool
    by_scores: tuple[tuple[int, int], ...] = ()


@lru_cache(256)
def tangent(text: str, rows: int, row_indices: int, columns: int, sizes: int, moved: Moved) -> Tangent:
    """The derivative of a program in a direction. rows, ...: numbers of its data of each kind.

    sizes: number of its sizes; one more follows them, the length of the table of reals.
    """
    program = parse(text)
    graph = Graph(program.nodes)
    scores = [("score",), ("other",)][: program.scores]
    directions: dict[Node, Expression] = {}
    if program.scores == 1 and moved[0]:
        directions[scores[0]] = graph.leaf("other")
    if moved[2]:
        directions |= {("row", k): graph.leaf("row", rows + k) for k in range(rows)}
    if moved[3]:
        directions |= {("column", k): graph.leaf("column", columns + k) for k in range(columns)}
    if moved[5]:
        length = graph.leaf("size", sizes)
        for gather in {node for node in program.nodes if node[0] == "gather"}:
            beside = graph.raw("table_place", length, Expression(graph, gather[1]))
            directions[gather] = graph.raw("gather", beside)

    def node(number: int) -> Expression:
        return Expression(graph, number)

    def value(k: int) -> Expression:
        return graph.leaf("row", 2 * rows + k)

    of_softmaxes = program.log_sum_exps

    def surprise(i: int) -> Expression:
        """Minus the logarithm of an element's probability in softmax i."""
        low = graph.leaf("row", 2 * rows + program.values + i)
        return finite_surprise((value(of_softmaxes[i]) - node(program.softmaxes[i][0])) + low)

    def of_entropy(e: int) -> Expression:
        """What has the mean 0."""
        return surprise(program.entropies[e]) - value(program.first_entropy + e)

    def along(number: int, directions: Mapping[Node, Expression]) -> Expression:
        adjoint = Adjoint(graph)
        adjoint.add(number, graph.constant(1.0))
        adjoint.pull_back(program.nodes)
        total = graph.constant(0.0)
        slopes = {**adjoint.by_leaves(program.nodes), **adjoint.by_gathers(program.nodes)}
        for leaf, slope in slopes.items():
            if leaf in directions:
                total = total + slope * directions[leaf]
        return total

    def moves(directions: Mapping[Node, Expression]) -> list[tuple[int, Expression]]:
        """For each value, whose mean its derivative is: of which softmax, -1 for a total, and of what."""
        found: list[tuple[int, Expression]] = []
        variances: dict[int, tuple[int, Expression]] = {}
        for i, (log_weight, *means) in enumerate(program.softmaxes):
            by_weight = along(log_weight, directions)
            found.append((i, by_weight))
            for k, mean in enumerate(means):
                deviation, by_mean = node(mean) - value(len(found)), along(mean, directions)
                found.append((i, by_mean + deviation * by_weight))
                if (i, k) in program.variances:
                    v = program.variances.index((i, k))
                    square = deviation * deviation - value(program.first_variance + v)
                    variances[v] = i, 2.0 * deviation * by_mean + square * by_weight
        found += [(-1, along(total, directions)) for total in program.totals]
        for value_there, n in program.in_columns:
            here = graph.leaf("position") == graph.leaf("row_index", row_indices + n, "number or none")
            moved_there = along(value_there, directions)
            found.append((-1, moved_there.where(here, moved_there, 0.0)))
        for e, i in enumerate(program.entropies):
            found.append((i, of_entropy(e) * along(program.softmaxes[i][0], directions)))
        return found + [variances[v] for v in range(len(variances))]

    parts = [[log_weight] for log_weight, *_ in program.softmaxes]  # of the derived softmaxes, then totals
    parts.append([])
    at: list[tuple[int, int] | None] = []
    for i, moved_value in moves(directions):
        is_zero = program.scores == 2 and moved_value.constant == 0.0
        at.append(None if is_zero else (i, len(parts[i])))
        if not is_zero:
            parts[i].append(moved_value.number)
    of_deviations: dict[int, tuple[int, int]] = {}  # by value: softmax, and place there
    for i, (lse, (_, *means)) in enumerate(zip(of_softmaxes, program.softmaxes, strict=True)):
        for k, mean in enumerate(means, lse + 1):
            of_deviations[k] = i, len(parts[i])
            parts[i].append((node(mean) - value(k)).number)
    for e, i in enumerate(program.entropies):
        of_deviations[program.first_entropy + e] = i, len(parts[i])
        parts[i].append(of_entropy(e).number)
    *softmaxes, totals = parts
    first = [sum(map(len, parts[:i])) for i in range(len(parts))]
    places = tuple([None if place is None else first[place[0]] + place[1] for place in at])
    deviations = {k: (of_softmaxes[i], first[i] + n) for k, (i, n) in of_deviations.items()}

    payloads: list[tuple[int, ...]] = []
    by_scores: list[tuple[int, int]] = []
    by_weights: list[list[Expression]] = []
    for softmax, *factors in program.payloads:
        by_factors = [along(factor, directions) for factor in factors]
        if softmax >= 0:
            by_log_weight = along(program.softmaxes[softmax][0], directions)
            by_factors = [
                by + node(factor) * by_log_weight for by, factor in zip(by_factors, factors, strict=True)
            ]
        by_weights.append(by_factors)
    of_directions = moved[4]
    of_vectors = any(by.constant != 0.0 for by_factors in by_weights for by in by_factors)
    for (softmax, *factors), by_factors in zip(program.payloads, by_weights, strict=True):
        weights = factors if of_directions else []
        weights += [by.number for by in by_factors] if of_vectors else []
        if weights:
            payloads.append((softmax, *weights))
    if program.scores == 2:
        for score, leaf in enumerate(scores):
            slopes = moves({leaf: graph.constant(1.0)}) if moved[score] else []
            for k, (softmax, slope) in enumerate(slopes):
                if slope.constant != 0.0:
                    payloads.append((softmax, slope.number))
                    by_scores.append((k, score))
    derived, kept = Program(
        tuple(graph.nodes),
        tuple(map(tuple, softmaxes)),
        tuple(totals),
        payloads=tuple(payloads),
        ignored=program.ignored,
    ).pruned()
    of_slopes = tuple([place + 1 for place in first[:-1]])
    how = of_directions, of_vectors
    return Tangent(derived.text, kept, places, deviations, of_slopes, *how, tuple(by_scores))
