"""The passes of a program by torch, in chunks of columns.

They serve what the kernels lack: the k largest, more than two scores, gradients of tensors indexed by row and
column together, and CUDA without a compiler for kernels. A chunk has as many columns as fit in the workspace;
its scores, and the values of each operation, are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.products import without_autocast
from monoidreduce.folds.operands import Counts, ProgramCall
from monoidreduce.folds.program.derivative import gradient
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.folds.torch.reader import evaluate, largest_in_order, with_scores

__all__ = ["LEAST_COLUMNS", "Chunked", "product"]

LEAST_COLUMNS = 256
_MOST_AT_ONCE = 1024  # numbers of a row that are sorted together, to join chunks
# torch.mm(..., out_dtype=), which torch has on CUDA since 2.8
_SUMS_IN_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")
_SCORES = ("score", "other", "third")


class Chunked:
    """A call of up to three scores."""

    def __init__(self, call: ProgramCall) -> None:
        self.call, self.program, self.scale = call, call.parsed, call.scale
        self.rows, self.columns = len(call.a), len(call.b)
        self.dtype = accumulation_dtype(call.a.dtype)
        self.data = dict(zip(("row", "column", "row_index", "column_index"), call.data, strict=True))
        self.data |= zip(("gather", "index_gather"), call.tables, strict=True)
        of_element = 24 if self.program.most else 8  # scores, and what torch makes of them at a time
        most = call.bytes // (of_element * max(self.rows, 1))
        self.at_once = max(
            most // LEAST_COLUMNS * LEAST_COLUMNS, LEAST_COLUMNS
        )  # aligned, for torch's products

    def parts(self) -> Iterator[tuple[slice, Tensor, Callable[[Node], Tensor]]]:
        """For each chunk: its columns, its scores, and a function that gives the values of other leaves."""
        for first in range(0, max(self.columns, 1), self.at_once):
            part = slice(first, min(first + self.at_once, self.columns))
            yield part, self._scores(0, part), self._leaf(part)

    def _scores(self, number: int, part: slice) -> Tensor:
        rows, columns = self.call.scores[number]
        return product(rows, columns[part].T, self.dtype) * self.scale

    def _leaf(self, part: slice) -> Callable[[Node], Tensor]:
        def leaf(node: Node) -> Tensor:
            name, *number = node
            if name in _SCORES:
                return self._scores(_SCORES.index(name), part)
            vectors = self.data[name]
            assert vectors is not None
            if name in ("gather", "index_gather"):
                return vectors
            vector = vectors[number[0]]
            return vector[:, None] if name.startswith("row") else vector[part]

        return leaf

    def _with_upstream(
        self, leaf: Callable[[Node], Tensor], part: slice, gradients: Tensor, at: Tensor
    ) -> Callable[[Node], Tensor]:
        """Extend `leaf` to the gradients of the k largest values: a matrix that is 0 but in their columns."""
        counts = [k for _, k in self.program.most]
        of_most = [*zip(torch.split(gradients, counts), torch.split(at, counts), strict=True)]
        width = part.stop - part.start

        def of(node: Node) -> Tensor:
            if node[0] != "upstream":
                return leaf(node)
            upstream, columns = of_most[node[1]]
            here = (columns >= part.start) & (columns < part.stop)
            matrix = upstream.new_zeros(self.rows, width + 1)  # the last column takes those of other chunks
            matrix.scatter_(1, torch.where(here, columns - part.start, width).T, upstream.T)
            return matrix[:, :width]

        return of

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values, low words of log-sum-exps (0 here), and indices."""
        monoid = StatisticsMonoid(self.call.program)
        state = None
        for part, score, leaf in self.parts():
            of_part = monoid.of_scores(score, leaf, part.start)
            state = of_part if state is None else monoid.combine(state, of_part)
        values, indices = monoid.project(state)
        return values, values.new_zeros(len(self.program.softmaxes), self.rows), indices

    def most(self) -> tuple[Tensor, Tensor]:
        """The k largest values of the program's `most` and their columns, [sum of k, rows]."""
        program = self.program
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in program.most]
        for part, score, leaf in self.parts():
            elements = evaluate(program.nodes, program.used, with_scores(score, leaf, part.start), score)
            for (f, k), of_chunks in zip(program.most, found, strict=True):
                values, at = largest_in_order(elements[f].expand(score.shape), None, k)
                of_chunks.append((values, torch.where(at < 0, at, at + part.start)))
                if len(of_chunks) * k >= _MOST_AT_ONCE:
                    of_chunks[:] = [_joined(of_chunks, k)]
        joined = [_joined(of_chunks, k) for (_, k), of_chunks in zip(program.most, found, strict=True)]
        of_values, of_columns = (torch.cat(t, 1).mT.contiguous() for t in zip(*joined, strict=True))
        return of_values, of_columns

    def backward(
        self,
        counts: Counts,
        of_scores: Sequence[bool],
        of_row: bool,
        of_column: bool,
        of_most: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
        """The gradients of the operands, of the row data and of the column data, in the accumulation dtype.

        The call's data include what `derivative.gradient` adds.

        Args:
            counts: of data without that.
            of_scores, of_row, of_column: which are computed; the others are None.
            of_most: the gradients of the k largest values, and their columns, [sum of k, rows].
        """
        of = gradient(self.call.program, *counts[:2])
        operands = [t for pair in self.call.scores for t in pair]
        found = [
            torch.zeros_like(t, dtype=self.dtype) if wanted else None
            for t, wanted in zip(operands, of_scores, strict=True)
        ]
        d_row, d_column = (
            operands[0].new_zeros(count, n, dtype=self.dtype) if wanted and count else None
            for wanted, count, n in (
                (of_row, counts[0], self.rows),
                (of_column, counts[2], self.columns),
            )
        )
        by_scores = (of.score, of.other, of.third)
        roots = [i for i in (*by_scores, *of.rows, *of.columns) if i is not None]
        for part, score, leaf in self.parts():
            if of_most is not None:
                leaf = self._with_upstream(leaf, part, *of_most)
            values = evaluate(of.nodes.nodes, roots, with_scores(score, leaf, part.start), score)
            elements = {i: values[i].expand(score.shape) for i in roots}
            for n, ((rows, columns), number) in enumerate(zip(self.call.scores, by_scores, strict=False)):
                if number is None:
                    continue
                local = elements[number] * self.scale
                d_rows, d_columns = found[2 * n : 2 * n + 2]
                if d_rows is not None:
                    d_rows += product(local, columns[part], self.dtype)
                if d_columns is not None:
                    d_columns[part] = product(local.T, rows, self.dtype)
            for total, axis, numbers in ((d_row, 1, of.rows), (d_column, 0, of.columns)):
                for k, number in enumerate(numbers):
                    if total is not None and number is not None:
                        where = total[k] if axis == 1 else total[k, part]
                        where += elements[number].sum(axis)
        return found, d_row, d_column

    def of_table(self, counts: Counts, of_most: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
        """The gradient of the table of reals; None if it is 0. Arguments as in `backward`."""
        of, table = gradient(self.call.program, *counts[:2]), self.call.tables[0]
        if table is None or not of.gathers:
            return None
        found = torch.zeros_like(table, dtype=self.dtype)
        roots = [i for pair in of.gathers for i in pair]
        for part, score, leaf in self.parts():
            if of_most is not None:
                leaf = self._with_upstream(leaf, part, *of_most)
            values = evaluate(of.nodes.nodes, roots, with_scores(score, leaf, part.start), score)
            for by, entry in of.gathers:
                entries, gradients = (values[i].expand(score.shape).reshape(-1) for i in (entry, by))
                found.index_add_(0, entries, gradients)
        return found


def _joined(of_chunks: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of all chunks, from those of each: (values, columns), in the order of chunks."""
    values, columns = (torch.cat(t, 1) for t in zip(*of_chunks, strict=True))
    order: Any = values.argsort(descending=True, stable=True)
    return values.gather(1, order[:, :k]), columns.gather(1, order[:, :k])


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ y, summed in this dtype, even under autocast. On a GPU both have 16 bits if y does."""
    with without_autocast(y):
        if y.is_cuda and y.dtype.itemsize == 2 and _SUMS_IN_FLOAT32:
            return torch.mm(x.to(y.dtype), y, out_dtype=dtype)
        return x.to(dtype) @ y.to(dtype)
