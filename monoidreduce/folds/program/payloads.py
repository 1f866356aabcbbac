"""The programs by which payload sums are computed and differentiated.

A payload sum is P_i = sum_j w_ij v_j, where w is a number of the element and v_j a vector of the column. Let
G be the gradient with respect to P, and t_ij = <G_i, v_j> one more score of the element. Then

    sum_i <G_i, P_i> = sum_ij w_ij t_ij

is a total of numbers; for a mean of f v it is the mean of f t. So its gradient is that of a fold of numbers,
which all engines know (`with_score`). Its gradients with respect to v and G are products with the weights,
sum_i w_ij G_i and sum_j w_ij v_j. The second is P itself: an engine computes a payload sum as the gradient of
the rows of a score that it never reads (`weights`).

Where a column has several vectors for a payload sum, t_ij is the sum over as many scores. Kernels have two
scores; for them it is the sum of as many payload sums, of one vector each (`separated`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce

from monoidreduce.folds.program.derivative import ALWAYS, selected
from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.program import Program, parse, reachable

__all__ = [
    "counting_excluded",
    "is_attention",
    "is_mean",
    "is_mean_alone",
    "may_exclude",
    "separated",
    "weights",
    "with_score",
]


@lru_cache(256)
def separated(text: str) -> str:
    """The program in which each vector of a column has a payload sum of its own: those of the first vectors,
    then those of the second ones, and so on."""
    program = parse(text)
    by_vectors = range(1, 1 + program.vectors)
    payloads = [(payload[0], payload[n]) for n in by_vectors for payload in program.payloads]
    return replace(program, payloads=tuple(payloads)).text


@lru_cache(256)
def weights(text: str, number: int, rows: int) -> tuple[str, Mapping[str, Sequence[int]]]:
    """The program of the weights of payload sum `number`, as factors of one more score; and the data it uses.

    rows: number of row reals. Three more follow them: the softmax's log-sum-exp, its low word, and a number
    by which all weights are multiplied.
    """
    program = parse(text)
    softmax, factor = program.payloads[number]
    graph = Graph(program.nodes)
    weight, guard = Expression(graph, factor), ALWAYS
    if softmax >= 0:
        log_weight = Expression(graph, program.softmaxes[softmax][0])
        lse, low = (graph.leaf("row", rows + k) for k in range(2))
        weight = graph.apply("share", log_weight, lse, low) * weight
        guard = frozenset({((log_weight == -math.inf).number, False)})
    weight = selected(weight * graph.leaf("row", rows + 2), guard)
    nothing = graph.constant(0.0).number
    derived, kept = Program(tuple(graph.nodes), factors=(*[nothing] * program.scores, weight.number)).pruned()
    return derived.text, kept


@lru_cache(256)
def may_exclude(text: str, number: int) -> bool:
    """Whether a payload sum may leave out elements of finite scores: a mean with log weights of -inf."""
    program = parse(text)
    softmax, *_ = program.payloads[number]
    if softmax < 0:
        return False
    used = {program.nodes[i] for i in reachable(program.nodes, [program.softmaxes[softmax][0]])}
    return any(name in ("row", "column", "log") or (name, *rest) in _INFINITE for name, *rest in used)


_INFINITE = {("real", sign + "inf") for sign in ("", "-")}


@lru_cache(256)
def counting_excluded(text: str, columns: int) -> tuple[str, tuple[int, ...]]:
    """The program with one more count for each payload sum that may leave out elements: how many vectors that
    are not finite it takes in. The second result is the numbers of these payload sums.

    columns: number of column reals. One more for each of these sums follows: whether the column's vector is
    not finite.
    """
    program = parse(text)
    graph, counts = Graph(program.nodes), list(program.counts)
    numbers = tuple(n for n in range(len(program.payloads)) if may_exclude(text, n))
    for k, number in enumerate(numbers):
        softmax, *_ = program.payloads[number]
        log_weight = Expression(graph, program.softmaxes[softmax][0])
        taken = ~(log_weight == -math.inf) & (graph.leaf("column", columns + k) != 0)
        counts.append(taken.number)
    return replace(program, nodes=tuple(graph.nodes), counts=tuple(counts)).text, numbers


@lru_cache(256)
def with_score(text: str, number: int) -> tuple[str, int]:
    """The program in which payload sum `number` is a statistic of numbers: f times a further score, summed
    over its f.

    The second result is its place among the values.
    """
    program = parse(text)
    softmax, *factors = program.payloads[number]
    graph = Graph(program.nodes)
    leaves = ("other", "third", "fourth")[program.scores - 1 :]
    products = [
        graph.raw("mul", Expression(graph, factor), graph.leaf(leaf))
        for factor, leaf in zip(factors, leaves, strict=False)
    ]
    node = reduce(operator.add, products).number
    softmaxes, totals = list(program.softmaxes), program.totals
    if softmax >= 0:
        softmaxes[softmax] = (*softmaxes[softmax], node)
        place = sum(map(len, softmaxes[: softmax + 1])) - 1
    else:
        totals = (*totals, node)
        place = sum(map(len, softmaxes)) + len(program.totals)
    derived = replace(
        program, nodes=tuple(graph.nodes), softmaxes=tuple(softmaxes), totals=totals, payloads=()
    )
    return derived.text, place


def is_mean(program: Program, number: int) -> bool:
    """Whether payload sum `number` is the mean of the vectors themselves by a softmax."""
    softmax, *factors = program.payloads[number]
    return softmax >= 0 and [program.nodes[factor] for factor in factors] == [("real", (1.0).hex())]


def is_mean_alone(program: Program) -> bool:
    """Whether a program of one score has a payload's mean by one softmax, its log-sum-exp, and no more."""
    numbers = (program.totals, program.largest, program.counts, program.entropies)
    others = (*numbers, program.variances, program.most)
    if any(others) or program.ignored is not None or program.scores != 1:
        return False
    return list(map(len, program.softmaxes)) == [1] and len(program.payloads) == 1 and is_mean(program, 0)


def is_attention(program: Program) -> bool:
    """Whether a program is attention itself: the mean of a payload by softmax(score), and the log-sum-exp."""
    return is_mean_alone(program) and program.nodes[program.softmaxes[0][0]] == ("score",)
