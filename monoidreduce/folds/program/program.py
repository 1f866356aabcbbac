"""A program as data: a graph of operations, the statistics that fold it, and both as canonical text.

The order of results is fixed. Values: for each softmax its log-sum-exp and its means, then totals, then
largest values, then carried values, then entropies, then variances, then the k largest values of `most`.
Integers: the columns of the largest values, then counts, then the columns of `most`. Payload sums have
tensors of their own: for each entry of `payloads` the rows of a matrix, summed over the columns with the
elements' weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.program.operations import DTYPES, LEAVES, OPERATIONS

MOST = 64  # largest k of `most`
_NO_MORE: Any = ((), (), None, (), (), None, (), ())  # the fields that a program's text leaves out together

__all__ = ["MOST", "Program", "operands", "parse", "reachable", "with_sizes", "without_own_row"]


def operands(node: Node) -> tuple[int, ...]:
    """The numbers of a node's arguments."""
    return () if node[0] in LEAVES else node[1:]


def reachable(nodes: Sequence[Node], roots: Iterable[int]) -> list[int]:
    """The numbers of all nodes that the roots depend on, arguments first."""
    needed = set(roots)
    for number in range(len(nodes) - 1, -1, -1):
        if number in needed:
            needed.update(operands(nodes[number]))
    return sorted(needed)


@dataclass(frozen=True)
class Program:
    """A program; ints are numbers of nodes.

    softmaxes: for each, the log weight followed by the f of its means.
    payloads: for each payload sum (softmax, f, ...). A column has a vector for each f, with the weight f
        times its probability in that softmax, or f alone if softmax is -1. The sum is over the columns and
        over the f. All payload sums have as many f.
    factors: for a program that is not a fold: for each score, the weights of its product with the operands
        (`derivative.gradient` returns them instead of gradients).
    ignored: a row integer, by its number among the data, and a value. Where they are equal, the row has the
        results of an empty fold, and no gradients. None if all rows are folded.
    variances: pairs (softmax, k): the variance of the f whose mean is number k of that softmax.
    most: pairs (f, k): the k largest f, in order.
    entropies: the softmaxes whose entropies are wanted.
    carried: for the first of `largest`, another value that is wanted of the same column. It must be -inf
        where the value in `largest` is.
    own_row: the row integer, by its number among the data, that is the row's number in its batch. None if
        there is none, or if that is not known.
    """

    nodes: tuple[Node, ...]
    softmaxes: tuple[tuple[int, ...], ...] = ()
    totals: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    payloads: tuple[tuple[int, ...], ...] = ()
    factors: tuple[int, ...] = ()
    ignored: tuple[int, int] | None = None
    variances: tuple[tuple[int, int], ...] = ()
    most: tuple[tuple[int, int], ...] = ()
    own_row: int | None = None
    entropies: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()

    @property
    def roots(self) -> Iterator[int]:
        """The nodes that statistics of one number fold."""
        for softmax in self.softmaxes:
            yield from softmax
        yield from (*self.totals, *self.largest, *self.carried, *self.counts)

    @property
    def used(self) -> Iterator[int]:
        yield from (*self.roots, *self.weights, *self.factors)
        yield from (f for f, _ in self.most)

    @property
    def weights(self) -> Iterator[int]:
        """The f of all payload sums."""
        for _, *weights in self.payloads:
            yield from weights

    @property
    def vectors(self) -> int:
        """The number of vectors that a column has for each payload sum."""
        return len(self.payloads[0]) - 1 if self.payloads else 1

    @cached_property
    def scores(self) -> int:
        if self.factors:
            return len(self.factors)
        leaves = ("other",), ("third",), ("fourth",)
        return max((n for n, leaf in enumerate(leaves, 2) if leaf in self.nodes), default=1)

    @cached_property
    def values(self) -> int:
        """Number of real results of a row."""
        return self.first_of_most + sum(k for _, k in self.most)

    @property
    def log_sum_exps(self) -> list[int]:
        """The places of the log-sum-exps among the values."""
        return [sum(map(len, self.softmaxes[:i])) for i in range(len(self.softmaxes))]

    @property
    def first_largest(self) -> int:
        """The place of the first largest value among the values."""
        return sum(map(len, self.softmaxes)) + len(self.totals)

    @property
    def in_columns(self) -> Iterator[tuple[int, int]]:
        """All values that a row takes from one column: pairs (node, number of the largest value whose column
        that is). First the largest values themselves, then the carried ones."""
        for values in (self.largest, self.carried):
            for n, value in enumerate(values):
                yield value, n

    @property
    def first_entropy(self) -> int:
        """The place of the first entropy among the values."""
        return self.first_largest + len(self.largest) + len(self.carried)

    @property
    def first_variance(self) -> int:
        """The place of the first variance among the values."""
        return self.first_entropy + len(self.entropies)

    @property
    def first_of_most(self) -> int:
        """The place of the first value of `most` among the values."""
        return self.first_variance + len(self.variances)

    def mean_of(self, variance: int) -> int:
        """The place of a variance's mean among the values."""
        softmax, k = self.variances[variance]
        return sum(map(len, self.softmaxes[:softmax])) + 1 + k

    @cached_property
    def indices(self) -> int:
        return len(self.largest) + len(self.counts) + sum(k for _, k in self.most)

    @cached_property
    def text(self) -> str:
        fields = (self.nodes, self.softmaxes, self.totals, self.largest, self.counts)
        more = (self.payloads, self.factors, self.ignored, self.variances, self.most)
        more += (self.own_row, self.entropies, self.carried)  # type: ignore[assignment]
        if more != _NO_MORE:
            fields += more  # type: ignore[assignment]
        return json.dumps(fields, separators=(",", ":"))

    def pruned(self) -> tuple[Program, dict[str, list[int]]]:
        """The program without unused nodes, and with its data renumbered in order of use.

        The second result has, for each kind of data, the old numbers in the new order.
        """
        kept: dict[str, list[int]] = {"row": [], "column": [], "row_index": [], "column_index": []}
        renumbered: dict[int, int] = {}
        nodes: list[Node] = []
        for number in reachable(self.nodes, self.used):
            name, *rest = self.nodes[number]
            if name in kept:
                kept[name].append(rest[0])
                rest = [len(kept[name]) - 1, *rest[1:]]
            elif name not in LEAVES:
                rest = [renumbered[argument] for argument in rest]
            renumbered[number] = len(nodes)
            nodes.append((name, *rest))
        ignored, integers = self.ignored, kept["row_index"]
        if ignored is not None:
            label, value = ignored
            if label not in integers:
                integers.append(label)
            ignored = integers.index(label), value
        own_row = integers.index(self.own_row) if self.own_row in integers else None
        program = self.with_nodes(nodes, renumbered.__getitem__)
        return replace(program, ignored=ignored, own_row=own_row), kept

    def with_nodes(self, nodes: Iterable[Node], of: Callable[[int], int]) -> Program:
        """The program with other nodes. of: the new number of each node that statistics use."""
        return Program(
            tuple(nodes),
            tuple(tuple(map(of, softmax)) for softmax in self.softmaxes),
            tuple(map(of, self.totals)),
            tuple(map(of, self.largest)),
            tuple(map(of, self.counts)),
            tuple((softmax, *map(of, weights)) for softmax, *weights in self.payloads),
            tuple(map(of, self.factors)),
            self.ignored,
            self.variances,
            tuple((of(f), k) for f, k in self.most),
            self.own_row,
            self.entropies,
            tuple(map(of, self.carried)),
        )


@lru_cache(256)
def parse(text: str) -> Program:
    """The inverse of `Program.text`. Raises ValueError for a text that it could not have written."""
    try:
        nodes, softmaxes, totals, largest, counts, *more = json.loads(text)
        payloads, factors, ignored, variances, most, own_row, entropies, carried = more or _NO_MORE
        program = Program(
            tuple(map(tuple, nodes)),
            tuple(map(tuple, softmaxes)),
            tuple(totals),
            tuple(largest),
            tuple(counts),
            tuple(map(tuple, payloads)),
            tuple(factors),
            None if ignored is None else (ignored[0], ignored[1]),
            tuple((softmax, k) for softmax, k in variances),
            tuple((f, k) for f, k in most),
            own_row,
            tuple(entropies),
            tuple(carried),
        )
        _check(program)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"program: expected a text that monoidreduce wrote, got {text[:200]!r}") from error
    return program


@lru_cache(256)
def with_sizes(text: str, sizes: tuple[int, ...]) -> str:
    """The program with the sizes of its call as constants."""
    program = parse(text)
    nodes = (("integer", sizes[node[1]]) if node[0] == "size" else node for node in program.nodes)
    return replace(program, nodes=tuple(nodes)).text


@lru_cache(256)
def without_own_row(text: str) -> str:
    """The program, where it is not known which row integer is the row's number in its batch."""
    return replace(parse(text), own_row=None).text


def _check(program: Program) -> None:
    kinds: list[str] = []
    for name, *rest in program.nodes:
        if name in LEAVES:
            if name == "real":
                float.fromhex(rest[0])
            elif name in ("row_index", "column_index"):
                number, dtype = rest
                _number(number, number + 1)
                DTYPES.index(dtype)
            elif not all(type(x) is int and (x >= 0 or name == "integer") for x in rest):
                raise ValueError(name)
            kinds.append(LEAVES[name])
        else:
            *expected, kind = OPERATIONS[name].kinds
            if [kinds[_number(x, len(kinds))] for x in rest] != expected:
                raise ValueError(name)
            kinds.append(kind)
    of_reals = (
        *sum(program.softmaxes, ()),
        *program.totals,
        *program.largest,
        *program.carried,
        *program.weights,
        *program.factors,
        *(f for f, _ in program.most),
    )
    for roots, kind in ((of_reals, "real"), (program.counts, "bool")):
        if any(kinds[_number(x, len(kinds))] != kind for x in roots):
            raise ValueError("a statistic")
    if not all(program.softmaxes) and program.softmaxes:
        raise ValueError("a softmax")
    if len(program.carried) > len(program.largest):
        raise ValueError("a carried value")
    if not all(type(s) is int and -1 <= s < len(program.softmaxes) for s, *_ in program.payloads):
        raise ValueError("a payload")
    if any(len(payload) != 1 + max(program.vectors, 1) for payload in program.payloads):
        raise ValueError("the weights of a payload")
    if program.ignored is not None:
        label, value = program.ignored
        _number(label, label + 1)
        if type(value) is not int:
            raise ValueError("a label")
    if program.own_row is not None:
        _number(program.own_row, program.own_row + 1)
    if any(type(k) is not int or not 1 <= k <= MOST for _, k in program.most):
        raise ValueError("the largest")
    for softmax in program.entropies:
        _number(softmax, len(program.softmaxes))
    if len({*program.entropies}) != len(program.entropies):
        raise ValueError("entropies")
    for softmax, k in program.variances:
        _number(k, len(program.softmaxes[_number(softmax, len(program.softmaxes))]) - 1)


def _number(x: Any, count: int) -> int:
    if type(x) is not int or not 0 <= x < count:
        raise ValueError(x)
    return x
