"""The passes of a program by torch, in chunks of elements.

They serve what the kernels lack: the k largest, more than two scores, gradients of tensors indexed by row and
column together, and CUDA without a compiler for kernels. A chunk's scores, and the values of each operation
until their last use, are stored. So it has as many elements as fit in the workspace: several batches, some
columns of one, or, if these do not fit for all rows, some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._ops.products import without_autocast
from monoidreduce.folds.operands import Counts, ProgramCall
from monoidreduce.folds.program.derivative import Gradient, gradient
from monoidreduce.folds.program.graph import Node
from monoidreduce.folds.torch.footprint import bytes_of_element
from monoidreduce.folds.torch.monoid import StatisticsMonoid
from monoidreduce.folds.torch.reader import evaluate, largest_in_order

__all__ = ["LEAST_COLUMNS", "Chunked", "product"]

LEAST_COLUMNS = 256
_MOST_AT_ONCE = 1024  # numbers of a row that are sorted together, to join chunks
_SORTED = 40  # bytes of an element while torch looks for the k largest
# torch.mm(..., out_dtype=) and torch.bmm's, which torch has on CUDA since 2.8
_SUMS_IN_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")
_SCORES = ("score", "other", "third", "fourth")


class _Part(NamedTuple):
    """A chunk. batch: the number of its batch, or a slice of several, which are the first axis of its values.

    rows, columns: of each batch.
    """

    batch: int | slice
    rows: slice
    columns: slice

    @property
    def batches(self) -> range:
        """The numbers of its batches."""
        if isinstance(self.batch, slice):
            return range(self.batch.start, self.batch.stop)
        return range(self.batch, self.batch + 1)


class Chunked:
    """A call of up to four scores. batches: how many it has, which are as large."""

    def __init__(self, call: ProgramCall, batches: int = 1) -> None:
        self.call, self.program, self.scale, self.batches = call, call.parsed, call.scale, batches
        self.rows, self.columns = len(call.a) // batches, len(call.b) // batches
        self.dtype = accumulation_dtype(call.a.dtype)
        self.scores = [
            (self._by_batches(rows, 0), self._by_batches(columns, 0)) for rows, columns in call.scores
        ]
        self.data = {
            name: None if t is None else self._by_batches(t, 1)
            for name, t in zip(("row", "column", "row_index", "column_index"), call.data, strict=True)
        }
        self.tables = dict(zip(("gather", "index_gather"), call.tables, strict=True))

    def _by_batches(self, t: Tensor, axis: int) -> Tensor:
        """A view with the axis that has those of all batches in two: batches, and those of each."""
        return t.view(*t.shape[:axis], self.batches, t.shape[axis] // self.batches, *t.shape[axis + 1 :])

    def _parts(self, of_element: int) -> Iterator[_Part]:
        """Chunks that fit in the workspace. of_element: the bytes that each element takes."""
        most = max(self.call.bytes // of_element, 1)
        of_rows, of_batch = max(self.rows, 1), max(self.rows, 1) * max(self.columns, 1)
        if self.batches > 1 and of_batch <= most:
            whole = slice(0, self.rows), slice(0, self.columns)
            yield from (_Part(part, *whole) for part in _slices(self.batches, most // of_batch))
            return
        at_once = max(most // of_rows // LEAST_COLUMNS, 1) * LEAST_COLUMNS  # aligned, for torch's products
        rows_at_once = max(most // at_once, LEAST_COLUMNS)
        for batch in range(self.batches):
            for rows in _slices(self.rows, rows_at_once):
                for columns in _slices(self.columns, at_once, LEAST_COLUMNS):
                    yield _Part(batch, rows, columns)

    def _scores(self, number: int, part: _Part) -> Tensor:
        rows, columns = self._operands(number, part)
        return product(rows, columns.mT, self.dtype).mul_(self.scale)

    def _operands(self, number: int, part: _Part) -> tuple[Tensor, Tensor]:
        rows, columns = self.scores[number]
        return rows[part.batch, part.rows], columns[part.batch, part.columns]

    def _leaf(self, part: _Part) -> Callable[[Node], Tensor]:
        """A function that gives the values of leaves in a chunk."""

        def leaf(node: Node) -> Tensor:
            name, *number = node
            if name in _SCORES:
                return self._scores(_SCORES.index(name), part)
            if name == "position":
                return torch.arange(part.columns.start, part.columns.stop, device=self.call.a.device)
            if name in self.tables:
                table = self.tables[name]
                assert table is not None
                return table
            data = self.data[name]
            assert data is not None
            vector = data[number[0]][part.batch]
            return vector[..., part.rows, None] if name.startswith("row") else vector[..., None, part.columns]

        return leaf

    def _evaluated(
        self, nodes: Sequence[Node], numbers: Collection[int], part: _Part, leaf: Callable[[Node], Tensor]
    ) -> dict[int, Tensor]:
        """The values of these nodes in a chunk, [batches, if it has several, rows, columns]."""
        values = evaluate(nodes, numbers, leaf, self.call.a.new_empty(0, dtype=self.dtype))
        leading = (part.batch.stop - part.batch.start,) if isinstance(part.batch, slice) else ()
        shape = *leading, part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
        return {i: values[i].expand(shape) for i in numbers}

    def _with_upstream(
        self, leaf: Callable[[Node], Tensor], part: _Part, gradients: Tensor, at: Tensor
    ) -> Callable[[Node], Tensor]:
        """Extend `leaf` to the gradients of the k largest values: a matrix that is 0 but in their columns."""
        counts = [k for _, k in self.program.most]
        of_rows = (t[:, part.rows] for t in (gradients, at))
        of_most = [*zip(*(torch.split(t, counts) for t in of_rows), strict=True)]
        first, stop = part.columns.start, part.columns.stop

        def of(node: Node) -> Tensor:
            if node[0] != "upstream":
                return leaf(node)
            upstream, columns = of_most[node[1]]
            here = (columns >= first) & (columns < stop)
            # One more column takes the gradients of columns in other chunks, and is cut off.
            matrix = upstream.new_zeros(upstream.shape[1], stop - first + 1)
            matrix.scatter_(1, torch.where(here, columns - first, stop - first).T, upstream.T)
            within: Tensor = matrix[:, :-1]
            return within

        return of

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values, low words of log-sum-exps (0 here), and indices."""
        monoid, program = StatisticsMonoid(self.call.program), self.program
        states: dict[tuple[int, int], Any] = {}  # by the batch and the first row of each chunk of rows
        # The scores; what each softmax keeps of an element; and what torch makes of one in between.
        of_statistics = (1 + 2 * len(program.softmaxes) + 4) * self.dtype.itemsize
        of_statistics += _SORTED if program.most else 0
        of_nodes = bytes_of_element(program.nodes, [*program.used], self.dtype)
        for part in self._parts(of_nodes + of_statistics):
            for batch in part.batches:
                one = part._replace(batch=batch)
                of_part = monoid.of_scores(self._scores(0, one), self._leaf(one), part.columns.start)
                first = batch, part.rows.start
                states[first] = monoid.combine(states[first], of_part) if first in states else of_part
        values, indices = (torch.cat(t, 1) for t in zip(*map(monoid.project, states.values()), strict=True))
        return values, values.new_zeros(len(program.softmaxes), values.shape[1]), indices

    def most(self) -> tuple[Tensor, Tensor]:
        """The k largest values of the program's `most` and their columns, [sum of k, rows].

        The call has one batch.
        """
        program = self.program
        found: dict[int, list[list[tuple[Tensor, Tensor]]]] = {}  # by the first row of each chunk of rows
        functions = [f for f, _ in program.most]
        of_element = bytes_of_element(program.nodes, functions, self.dtype) + _SORTED

        def take(part: _Part) -> None:
            elements = self._evaluated(program.nodes, functions, part, self._leaf(part))
            of_rows = found.setdefault(part.rows.start, [[] for _ in program.most])
            for (f, k), of_chunks in zip(program.most, of_rows, strict=True):
                values, at = largest_in_order(elements[f], None, k)
                of_chunks.append((values, torch.where(at < 0, at, at + part.columns.start)))
                if len(of_chunks) * k >= _MOST_AT_ONCE:
                    of_chunks[:] = [_joined(of_chunks, k)]

        for part in self._parts(of_element):
            take(part)
        joined = [
            [_joined(of_chunks, k) for (_, k), of_chunks in zip(program.most, of_rows, strict=True)]
            for of_rows in found.values()
        ]
        of_values, of_columns = (
            torch.cat([torch.cat([pair[n] for pair in of_rows], 1) for of_rows in joined]).mT.contiguous()
            for n in range(2)
        )
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
            of_most: the gradients of the k largest values of one batch, and their columns, [sum of k, rows].
        """
        of = gradient(self.call.program, *counts[:2])
        operands = [t for pair in self.call.scores for t in pair]
        found = [
            torch.zeros_like(t, dtype=self.dtype, memory_format=torch.contiguous_format) if wanted else None
            for t, wanted in zip(operands, of_scores, strict=True)
        ]
        d_row, d_column = (
            operands[0].new_zeros(count, len(t), dtype=self.dtype) if wanted and count else None
            for wanted, count, t in (
                (of_row, counts[0], self.call.a),
                (of_column, counts[2], self.call.b),
            )
        )
        sums = [None if t is None else self._by_batches(t, 0) for t in found]
        of_products = [  # for each score with a gradient that is wanted: its number, and its node
            (n, number)
            for n, number in enumerate((of.score, of.other, of.third, of.fourth)[: len(self.scores)])
            if number is not None and any(of_scores[2 * n : 2 * n + 2])
        ]
        of_data = [  # for each datum: its node, the axis of the sum, and the sum
            (number, axis, self._by_batches(total, 1)[k])
            for total, axis, numbers in ((d_row, -1, of.rows), (d_column, -2, of.columns))
            for k, number in enumerate(numbers)
            if total is not None and number is not None
        ]
        roots = {number for _, number in of_products} | {number for number, *_ in of_data}

        def add(part: _Part) -> None:  # what it makes is released before the next chunk
            leaf = self._leaf(part)
            if of_most is not None:
                leaf = self._with_upstream(leaf, part, *of_most)
            elements = self._evaluated(of.nodes.nodes, roots, part, leaf)
            for n, number in of_products:
                (rows, columns), (d_rows, d_columns) = self._operands(n, part), sums[2 * n : 2 * n + 2]
                local = self._scaled(elements[number], rows)
                if d_rows is not None:
                    d_rows[part.batch, part.rows] += product(local, columns, self.dtype)
                if d_columns is not None:
                    d_columns[part.batch, part.columns] += product(local.mT, rows, self.dtype)
            for number, axis, total in of_data:
                at = part.rows if axis == -1 else part.columns
                total[part.batch, at] += elements[number].sum(axis)

        for part in self._parts(self._bytes_of_element(of, roots)):
            add(part)
        return found, d_row, d_column

    def _bytes_of_element(self, of: Gradient, numbers: Collection[int]) -> int:
        """The bytes of an element while these nodes, and then a product with one of them, are computed."""
        of_nodes = bytes_of_element(of.nodes.nodes, numbers, self.dtype)
        return max(of_nodes, (len(numbers) + 1) * self.dtype.itemsize)

    def _scaled(self, elements: Tensor, operand: Tensor) -> Tensor:
        """The elements times the scale, as a factor of a product with an operand."""
        dtype = operand.dtype if _multiplies_16_bits(operand) else self.dtype
        return torch.mul(elements, self.scale, out=elements.new_empty(elements.shape, dtype=dtype))

    def of_table(self, counts: Counts, of_most: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
        """The gradient of the table of reals; None if it is 0. Arguments as in `backward`."""
        of, table = gradient(self.call.program, *counts[:2]), self.call.tables[0]
        if table is None or not of.gathers:
            return None
        found = torch.zeros_like(table, dtype=self.dtype)
        roots = {i for pair in of.gathers for i in pair}
        of_copies = 8 + self.dtype.itemsize  # of an entry and its gradient

        def add(part: _Part) -> None:
            leaf = self._leaf(part)
            if of_most is not None:
                leaf = self._with_upstream(leaf, part, *of_most)
            values = self._evaluated(of.nodes.nodes, roots, part, leaf)
            for by, entry in of.gathers:
                found.index_add_(0, values[entry].reshape(-1), values[by].reshape(-1))

        for part in self._parts(self._bytes_of_element(of, roots) + of_copies):
            add(part)
        return found


def _slices(count: int, at_once: int, step: int = 1) -> Iterator[slice]:
    """At least one slice, each of at most `at_once` and from a multiple of `step` on, about equally large."""
    number = max(-(-count // at_once), 1)
    size = max(-(-count // (number * step)), 1) * step
    return (slice(first, min(first + size, count)) for first in range(0, max(count, 1), size))


def _joined(of_chunks: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest of all chunks, from those of each: (values, columns), in the order of chunks."""
    values, columns = (torch.cat(t, 1) for t in zip(*of_chunks, strict=True))
    order: Any = values.argsort(descending=True, stable=True)
    return values.gather(1, order[:, :k]), columns.gather(1, order[:, :k])


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ y, of matrices or of as many in each, summed in this dtype, even under autocast.

    On a GPU both have 16 bits if y does.
    """
    with without_autocast(y):
        if _multiplies_16_bits(y):
            multiply = torch.mm if y.dim() == 2 else torch.bmm
            return multiply(x.to(y.dtype), y, out_dtype=dtype)
        return x.to(dtype) @ y.to(dtype)


def _multiplies_16_bits(operand: Tensor) -> bool:
    """Whether `product` multiplies in the dtype of this operand, of 16 bits."""
    return operand.is_cuda and operand.dtype.itemsize == 2 and _SUMS_IN_FLOAT32
