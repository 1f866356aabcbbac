"""The program of variances: means of squared deviations from means that are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from monoidreduce.folds.program.graph import Expression, Graph
from monoidreduce.folds.program.program import Program, parse

__all__ = ["deviations"]


@lru_cache(256)
def deviations(text: str, rows: int) -> tuple[str, Mapping[str, Sequence[int]], tuple[int, ...]]:
    """The program that has, for each variance of a program, the mean of f - m and then that of (f - m)^2; its
    data; and for each variance the place of the first of the two among its values.

    m is the mean of f as it was rounded. The difference of E f^2 and (E f)^2 would lose the digits that these
    have in common.

    rows: number of the program's row reals. The means follow them, in the order of the variances.
    """
    program = parse(text)
    graph = Graph(program.nodes)
    softmaxes: list[tuple[int, ...]] = []
    places: dict[tuple[int, int], int] = {}
    place = 0
    for softmax, (log_weight, *means) in enumerate(program.softmaxes):
        derived = [log_weight]
        for n, (of, k) in enumerate(program.variances):
            if of == softmax:
                deviation = Expression(graph, means[k]) - graph.leaf("row", rows + n)
                places[of, k] = place + len(derived)
                derived += [deviation.number, (deviation * deviation).number]
        if len(derived) > 1:
            softmaxes.append(tuple(derived))
            place += len(derived)
    found, kept = Program(tuple(graph.nodes), tuple(softmaxes)).pruned()
    return found.text, kept, tuple(places[pair] for pair in program.variances)
