"""The columns that a row needs: beyond them, a program's elements have no weight in any softmax.

Functions mask elements by `torch.where(condition, score, -inf)`. A condition that compares the column with
numbers of the row, as causal masks and windows do, bounds the row's columns. Kernels leave out tiles beyond
the bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from monoidreduce.folds.program.program import Program, parse, reachable

__all__ = ["Bound", "column_bounds"]

_OF_ELEMENTS = {"position", "column", "column_index", "score", "other", "third", "fourth"}


class Bound(NamedTuple):
    """A bound of a row's columns: the sum of `terms`, pairs (factor, node of the row), and `offset`.

    upper: columns are below it; otherwise they are not below it.
    """

    upper: bool
    terms: tuple[tuple[int, int], ...]
    offset: int


@lru_cache(256)
def column_bounds(text: str) -> tuple[Bound, ...]:
    """The bounds that all softmaxes of a program have.

    None if elements beyond them would matter: for totals, largest values or counts.
    """
    program = parse(text)
    if program.totals or program.largest or program.counts or any(s < 0 for s, *_ in program.payloads):
        return ()
    common: set[Bound] | None = None
    for log_weight, *_ in program.softmaxes:
        found = set(_of_log_weight(program, log_weight))
        common = found if common is None else common & found
    return tuple(sorted(common or ()))


def _of_log_weight(program: Program, log_weight: int) -> Iterator[Bound]:
    name, *arguments = program.nodes[log_weight]
    if name == "where":
        condition, if_true, if_false = arguments
        for holds, excluded in ((True, if_false), (False, if_true)):
            if program.nodes[excluded] == ("real", (-math.inf).hex()):
                yield from _of_condition(program, condition, holds)


def _of_condition(program: Program, condition: int, holds: bool) -> Iterator[Bound]:
    """The bounds of the columns for which a condition holds, or does not."""
    name, *arguments = program.nodes[condition]
    if name == "not":
        yield from _of_condition(program, arguments[0], not holds)
    elif name == ("and" if holds else "or"):
        for argument in arguments:
            yield from _of_condition(program, argument, holds)
    elif name in ("index_lt", "index_le"):
        x, y = arguments if holds else reversed(arguments)
        strict = (name == "index_lt") == holds
        # x - y + strict <= 0
        position, terms, offset = _difference(program, x, y)
        offset += strict
        if position == 1:
            yield Bound(True, tuple(sorted((-k, n) for n, k in terms.items())), 1 - offset)
        elif position == -1:
            yield Bound(False, tuple(sorted((k, n) for n, k in terms.items())), offset)


def _difference(program: Program, x: int, y: int) -> tuple[int, Counter[int], int]:
    """x - y as a sum: how often it has the column's index, and each row number; and a constant.

    The first is 0 if x - y is no such sum.
    """
    position, offset, terms = 0, 0, Counter[int]()
    left = [(1, x), (-1, y)]
    while left:
        factor, number = left.pop()
        name, *arguments = program.nodes[number]
        if name == "position":
            position += factor
        elif name == "integer":
            offset += factor * arguments[0]
        elif name in ("index_add", "index_sub"):
            first, second = arguments
            left += [(factor, first), (factor if name == "index_add" else -factor, second)]
        elif _is_of_row(program, number):
            terms[number] += factor
        else:
            return 0, Counter(), 0
    return position, terms, offset


def _is_of_row(program: Program, node: int) -> bool:
    return all(program.nodes[n][0] not in _OF_ELEMENTS for n in reachable(program.nodes, [node]))
