"""Forward mode of programs: the derivative of a fold in a direction is a fold of one more score.

Let the operands, the data and the vectors of payload sums move in a direction. The score then moves by
<da_i, b_j> + <a_i, db_j>. That is one product, of rows [da, a] and columns [b, db]: a second score. The chain
rule gives how log weights w and what they weigh, f, move with it (dw, df). The statistics move by

    log-sum-exp of w    mean of dw
    mean of f           mean of df + (f - mean) dw
    variance of f       mean of 2 (f - mean) df + ((f - mean)^2 - variance) dw
    total of f          total of df
    largest f           df in its column
    payload sum P       sums of f dv and of (df + f dw) v, less P times the mean of dw; without dw for a total

Each is a statistic again, so a direction costs what a fold of two scores costs, on every engine. The gradient
of such a derivative is the product of a Hessian and the direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from monoidreduce.folds.program.derivative import Adjoint
from monoidreduce.folds.program.graph import Expression, Graph, Node
from monoidreduce.folds.program.program import Program, parse

__all__ = ["Moved", "Tangent", "tangent"]

Moved = tuple[bool, bool, bool]  # whether the operands, the row reals and the column reals move


@dataclass(frozen=True)
class Tangent:
    """A derived program, of two scores. kept: the data that it uses.

    Its row reals are the program's, their directions, and the program's values. Its row integers are the
    program's and the columns of the largest values. Its column reals are the program's and their directions.

    values: for each value of the program, the place of its derivative. slopes: for each softmax, the place of
    the derivative of its log-sum-exp. Payload sums come in pairs: those of dv, then those of v.
    """

    text: str
    kept: Mapping[str, Sequence[int]]
    values: tuple[int, ...]
    slopes: tuple[int, ...]


@lru_cache(256)
def tangent(text: str, rows: int, row_indices: int, columns: int, moved: Moved) -> Tangent:
    """The derivative of a program of one score. rows, ...: numbers of its data of each kind."""
    program = parse(text)
    if program.most:
        raise RuntimeError(
            "statistics with largest(f, k) or smallest(f, k) can be differentiated once. Do without "
            "create_graph=True and forward mode, or call the function's `reference`"
        )
    graph = Graph(program.nodes)
    directions: dict[Node, Expression] = {("score",): graph.leaf("other")} if moved[0] else {}
    if moved[1]:
        directions |= {("row", k): graph.leaf("row", rows + k) for k in range(rows)}
    if moved[2]:
        directions |= {("column", k): graph.leaf("column", columns + k) for k in range(columns)}

    def node(number: int) -> Expression:
        return Expression(graph, number)

    def along(number: int) -> Expression:
        adjoint = Adjoint(graph)
        adjoint.add(number, graph.constant(1.0))
        adjoint.pull_back(program.nodes)
        total = graph.constant(0.0)
        for leaf, slope in adjoint.by_leaves(program.nodes).items():
            if leaf in directions:
                total = total + slope * directions[leaf]
        return total

    softmaxes: list[tuple[int, ...]] = []
    values: list[int] = []
    slopes: list[int] = []
    variances: dict[int, int] = {}
    place = 0
    for log_weight, *means in program.softmaxes:
        by_weight, derived = along(log_weight), [log_weight]
        derived.append(by_weight.number)
        of_variances = {}
        for k, mean in enumerate(means, len(values) + 1):
            deviation, by_mean = node(mean) - graph.leaf("row", 2 * rows + k), along(mean)
            derived.append((by_mean + deviation * by_weight).number)
            which = len(softmaxes), k - len(values) - 1
            if which in program.variances:
                v = program.variances.index(which)
                square = deviation * deviation - graph.leaf("row", 2 * rows + program.first_variance + v)
                of_variances[v] = (2.0 * deviation * by_mean + square * by_weight).number
        softmaxes.append((*derived, *of_variances.values()))
        slopes.append(place + 1)
        values += [place + 1 + k for k in range(1 + len(means))]
        variances |= {v: place + len(derived) + k for k, v in enumerate(of_variances)}
        place += len(softmaxes[-1])
    totals = [along(total).number for total in program.totals]
    for n, largest in enumerate(program.largest):
        here = graph.leaf("position") == graph.leaf("row_index", row_indices + n, "number or none")
        by_largest = along(largest)
        totals.append(by_largest.where(here, by_largest, 0.0).number)
    values += [place + k for k in range(len(totals))]
    values += [variances[v] for v in range(len(variances))]
    payloads = []
    for softmax, factor in program.payloads:
        by_factor = along(factor)
        if softmax >= 0:
            by_factor = by_factor + node(factor) * along(program.softmaxes[softmax][0])
        payloads += [(softmax, factor), (softmax, by_factor.number)]
    derived_program, kept = Program(
        tuple(graph.nodes),
        tuple(softmaxes),
        tuple(totals),
        payloads=tuple(payloads),
        ignored=program.ignored,
    ).pruned()
    return Tangent(derived_program.text, kept, tuple(values), tuple(slopes))
